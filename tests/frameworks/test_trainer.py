"""The Trainer of transformers: its own `gradient_checkpointing` under the patch, and models enabled before."""

import warnings

import pytest
import torch

import recollect
from recollect import Save, policies

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # what a framework says while it is imported is not ours
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    pytest.importorskip("accelerate", reason="accelerate is not installed")
    from transformers.modeling_layers import GradientCheckpointingLayer

    from recollect.integrations.transformers import enable


def llama():
    config = transformers.LlamaConfig(
        num_hidden_layers=2,
        hidden_size=32,
        intermediate_size=64,
        num_attention_heads=4,
        num_key_value_heads=2,
        attention_dropout=0.2,
        vocab_size=64,
        max_position_embeddings=32,
        use_cache=False,
    )
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(config)


class Layers:
    """How often the layers of a model ran, and how often that was in a replay of recollect."""

    def __init__(self, model):
        self.runs = self.replays = 0
        for layer in model.modules():
            if isinstance(layer, GradientCheckpointingLayer):
                layer.self_attn.register_forward_pre_hook(self.count)

    def count(self, *_):
        self.runs += 1
        self.replays += recollect.is_recomputing()


def data():
    generator = torch.Generator().manual_seed(7)
    rows = torch.randint(0, 64, (8, 12), generator=generator)
    return [{"input_ids": row, "labels": row} for row in rows]


def train(model, folder, **options):
    """Two steps. Gives the weights and what the layers did."""
    layers = Layers(model)
    arguments = transformers.TrainingArguments(
        output_dir=str(folder),
        max_steps=2,
        per_device_train_batch_size=2,
        learning_rate=0.01,
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
        logging_strategy="no",
        save_strategy=options.pop("save_strategy", "no"),
        **options,
    )
    transformers.Trainer(model=model, args=arguments, train_dataset=data()).train()
    return {name: value.clone() for name, value in model.state_dict().items()}, layers


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []


CHECKPOINTED = {"gradient_checkpointing": True}


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """The weights after two steps that keep everything."""
    return train(llama(), tmp_path_factory.mktemp("plain"))[0]


@pytest.mark.parametrize(
    ("patch", "options"),
    [
        ({"determinism_check": "first"}, {}),
        ({}, {"gradient_checkpointing_kwargs": {"use_reentrant": True}}),
        (
            {"reentrant": "replace", "determinism_check": "values"},
            {"gradient_checkpointing_kwargs": {"use_reentrant": True}},
        ),
        ({"policy": policies.save_matmuls, "determinism_check": "first"}, {}),
        ({}, {"gradient_accumulation_steps": 2}),
        ({}, {"bf16": True}),
        ({}, {"max_grad_norm": 0.01, "optim": "adafactor"}),
    ],
    ids=["plain", "reentrant", "replaced", "policy", "accumulated", "bfloat16", "clipped"],
)
def test_it_trains_under_the_patch_and_ends_in_the_same_weights(tmp_path, plain, patch, options):
    others = {name: value for name, value in options.items() if not name.startswith("gradient_checkpointing")}
    expected = train(llama(), tmp_path, **others)[0] if others else plain
    with recollect.patch_torch(**patch):
        found, layers = train(llama(), tmp_path, **CHECKPOINTED, **options)
    assert_same(found, expected)
    steps = 2 * options.get("gradient_accumulation_steps", 1)
    assert (layers.runs, layers.replays) == (2 * 2 * steps, 2 * steps)


def test_every_second_layer(tmp_path, plain):
    with recollect.patch_torch():
        found, layers = train(
            llama(),
            tmp_path,
            **CHECKPOINTED,
            gradient_checkpointing_kwargs={"use_reentrant": False, "every_n_layers": 2},
        )
    assert_same(found, plain)
    assert (layers.runs, layers.replays) == (2 * 3, 2)


def test_after_the_patch_a_model_that_was_trained_under_it_is_torchs(tmp_path):
    model = llama()
    with recollect.patch_torch():
        train(model, tmp_path, **CHECKPOINTED)
    _, layers = train(model, tmp_path)  # still enabled by transformers, with what was served then
    assert (layers.runs, layers.replays) == (2 * 2 * 2, 0)


def test_a_checkpoint_of_a_run_under_the_patch_is_taken_up_without_it(tmp_path, plain):
    with recollect.patch_torch():
        train(llama(), tmp_path / "ours", **CHECKPOINTED, save_strategy="steps", save_steps=1)
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path / "after"),
        max_steps=2,
        per_device_train_batch_size=2,
        learning_rate=0.01,
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
        logging_strategy="no",
        save_strategy="no",
    )
    model = llama()
    trainer = transformers.Trainer(model=model, args=arguments, train_dataset=data())
    trainer.train(resume_from_checkpoint=str(tmp_path / "ours" / "checkpoint-1"))
    assert_same(model.state_dict(), plain)


@pytest.mark.parametrize("options", [{}, {"policy": policies.save_matmuls}, {"plan": {"**.mlp": Save()}}], ids=str)
def test_a_model_that_was_enabled_before_needs_no_patch(tmp_path, plain, options):
    model = llama()
    with enable(model, **options):
        found, layers = train(model, tmp_path)
    assert_same(found, plain)
    assert (layers.runs, layers.replays) == (2 * 2 * 2, 2 * 2)


def test_a_decided_model_is_trained(tmp_path, plain):
    model = llama()
    with recollect.apply(model, {"model.layers.*": recollect.Recompute()}):
        found, layers = train(model, tmp_path)
    assert_same(found, plain)
    assert (layers.runs, layers.replays) == (2 * 2 * 2, 2 * 2)
