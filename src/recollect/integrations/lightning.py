"""Lightning, as `lightning.pytorch`: a callback that has the modules of a model decided while it is fitted.

For `import pytorch_lightning` there is `recollect.integrations.pytorch_lightning`: the two packages have two
classes of the same name for everything, and a trainer wants those of its own. Fabric needs neither:
`recollect.apply(model, ...)`, then `fabric.setup(model, ...)`.
"""

from __future__ import annotations

from lightning.pytorch import Callback

from recollect.integrations._lightning import DecidesInFit


class Recollect(DecidesInFit, Callback):
    """Keep, recompute or offload modules of a LightningModule in `trainer.fit`.

    Nothing is renamed, so checkpoints are the same with it and without. Modules that the LightningModule makes in
    `setup` and `configure_model` are found; what wraps or shards the model comes after, around what is decided.

    Args:
        decisions: As for `recollect.apply`, by the names in the LightningModule: `{"model.layers.*":
            recollect.Recompute()}`. Or a plan, an object with a method `apply(model)`, which has options of its own.
        within: The name of the module that `decisions` are for, such as "model", where it is not the LightningModule.
        determinism_check: As for `recollect.checkpoint`.
        debug: As for `recollect.checkpoint`.
        early_stop: As for `recollect.checkpoint`.
        preserve_rng_state: As for `recollect.checkpoint`.

    Example:
        >>> import recollect
        >>> from recollect.integrations.lightning import Recollect
        >>> callback = Recollect({"model.layers.*": recollect.Recompute()})  # lightning.Trainer(callbacks=[callback])
    """
