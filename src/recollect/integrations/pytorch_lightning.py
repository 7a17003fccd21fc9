"""Lightning, as `pytorch_lightning`: the callback of `recollect.integrations.lightning` for the other package."""

from __future__ import annotations

from pytorch_lightning import Callback

from recollect.integrations._lightning import DecidesInFit


class Recollect(DecidesInFit, Callback):
    """Keep, recompute or offload modules of a LightningModule in `trainer.fit`.

    All that `recollect.integrations.lightning.Recollect` says holds here.

    Example:
        >>> import recollect
        >>> from recollect.integrations.pytorch_lightning import Recollect
        >>> callback = Recollect({"model.layers.*": recollect.Recompute()})  # Trainer(callbacks=[callback])
    """
