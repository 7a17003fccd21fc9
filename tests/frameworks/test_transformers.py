"""Models of transformers, built from small configurations with random weights: as the plain run, bit for bit."""

import copy
import io

import pytest
import torch
from torch import nn

import recollect
from recollect import Recompute, Save, policies

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

from recollect.integrations.transformers import enable  # noqa: E402

VOCABULARY = 64
DECODER = {
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 32,
}
LLAMA = {**DECODER, "num_key_value_heads": 2, "attention_dropout": 0.1}


def llama(layers=2):
    config = transformers.LlamaConfig(**{**LLAMA, "num_hidden_layers": layers})
    return transformers.LlamaForCausalLM(config)


def gpt2():
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(n_layer=2, n_embd=32, n_head=4, vocab_size=VOCABULARY, n_positions=32)
    )


def bert():
    return transformers.BertForMaskedLM(transformers.BertConfig(**DECODER))


def vit():
    sizes = {name: DECODER[name] for name in list(DECODER)[:4]}
    return transformers.ViTForImageClassification(
        transformers.ViTConfig(**sizes, image_size=16, patch_size=4, hidden_dropout_prob=0.1)
    )


def t5():
    config = transformers.T5Config(
        num_layers=2, d_model=32, d_ff=64, d_kv=8, num_heads=4, vocab_size=VOCABULARY, decoder_start_token_id=0
    )
    return transformers.T5ForConditionalGeneration(config)


def mixtral():
    return transformers.MixtralForCausalLM(
        transformers.MixtralConfig(**LLAMA, num_local_experts=4, output_router_logits=True)
    )


def qwen_moe():
    config = transformers.Qwen2MoeConfig(
        **LLAMA,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=32,
        num_experts=4,
        output_router_logits=True,
    )
    return transformers.Qwen2MoeForCausalLM(config)


MODELS = [llama, gpt2, bert, vit, t5, mixtral, qwen_moe]


def built(make, seed=0):
    torch.manual_seed(seed)
    return make().train()


def batch_of(model):
    generator = torch.Generator().manual_seed(7)
    if isinstance(model, transformers.ViTForImageClassification):
        return {"pixel_values": torch.randn(2, 3, 16, 16, generator=generator), "labels": torch.tensor([0, 1])}
    ids = torch.randint(0, VOCABULARY, (2, 16), generator=generator)
    return {"input_ids": ids, "labels": ids}


def step(model):
    """The loss and all gradients, with dropout on."""
    model.zero_grad()
    torch.manual_seed(1)
    # Under checkpointing transformers keeps no cache, and some models compute otherwise with one.
    cache = (
        {}
        if isinstance(model, transformers.ViTForImageClassification | transformers.BertForMaskedLM)
        else {"use_cache": False}
    )
    loss = model(**batch_of(model), **cache).loss
    loss.backward()
    return {"loss": loss.detach(), **{name: p.grad for name, p in model.named_parameters() if p.grad is not None}}


def assert_equal(found, expected):
    assert found.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []


def layers_of(model):
    return [m for m in model.modules() if isinstance(m, transformers.modeling_layers.GradientCheckpointingLayer)]


class Calls:
    """How often each layer runs."""

    def __init__(self, model):
        self.counts = [0] * len(layers_of(model))
        for place, layer in enumerate(layers_of(model)):
            layer.register_forward_pre_hook(lambda *_, place=place: self.add(place))

    def add(self, place):
        self.counts[place] += 1


@pytest.mark.parametrize("make", MODELS)
def test_every_layer_is_recomputed_and_the_gradients_are_those_of_the_plain_run(make):
    model = built(make)
    expected = step(model)
    calls = Calls(model)
    with enable(model):
        for _ in range(2):
            assert_equal(step(model), expected)
    assert calls.counts == [4] * len(calls.counts)
    assert_equal(step(model), expected)
    assert calls.counts == [5] * len(calls.counts)


@pytest.mark.parametrize("make", MODELS)
# With dropout in it, attention on the CPU is made of small operators: there is no attention to keep, and that is said.
@pytest.mark.filterwarnings("ignore:the policy recollect.policies.save_attention matched nothing")
@pytest.mark.parametrize("policy", [policies.save_attention, policies.save_matmuls], ids=repr)
def test_under_a_policy(make, policy):
    model = built(make)
    expected = step(model)
    with enable(model, policy=policy):
        assert_equal(step(model), expected)


@pytest.mark.parametrize(
    ("make", "plan"),
    [
        (llama, {"**.self_attn": Save()}),
        (llama, {"**.mlp": Save(), "**.self_attn": Recompute(policy=policies.save_matmuls)}),
        (gpt2, {"**.attn": Save()}),
        (mixtral, {"**.mlp": Save()}),
        (t5, {"**.SelfAttention": Save()}),
    ],
)
def test_modules_inside_the_layers_are_decided_by_a_plan(make, plan):
    model = built(make)
    expected = step(model)
    names = [name for name, module in model.named_modules() if isinstance(module, nn.Module)]
    with enable(model, plan=plan):
        for _ in range(2):
            assert_equal(step(model), expected)
    assert [name for name, _ in model.named_modules()] == names
    assert_equal(step(model), expected)


def test_a_kept_attention_is_not_run_again():
    model = built(llama)
    runs = []
    for layer in layers_of(model):
        layer.self_attn.q_proj.register_forward_pre_hook(lambda *_: runs.append(1))
    with enable(model, plan={"**.self_attn": Save()}):
        step(model)
    assert len(runs) == 2


def test_every_second_layer():
    model = built(lambda: llama(5))
    expected, calls = step(model), Calls(model)
    with enable(model, every_n_layers=2):
        assert_equal(step(model), expected)
    assert calls.counts == [2, 1, 2, 1, 2]


def test_it_is_transformers_to_switch_it_off():
    model = built(gpt2)
    enable(model)
    assert model.is_gradient_checkpointing
    calls = Calls(model)
    model.gradient_checkpointing_disable()
    step(model)
    assert not model.is_gradient_checkpointing
    assert calls.counts == [1, 1]


def test_what_was_there_before_comes_back():
    model = built(gpt2)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    before = [dict(vars(module)) for module in model.modules()]
    with enable(model):
        pass
    for module, attributes in zip(model.modules(), before, strict=True):
        assert vars(module).keys() == attributes.keys()
        assert all(vars(module)[name] is value for name, value in attributes.items())


def test_copies_and_pickles_of_an_enabled_model():
    model = built(llama)
    enable(model, policy=policies.save_matmuls)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    expected = step(model)
    for twin in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        calls = Calls(twin)
        assert_equal(step(twin), expected)
        assert calls.counts == [2, 2]


def test_evaluation_is_plain():
    model = built(gpt2).eval()
    enable(model)
    calls = Calls(model)
    model(**batch_of(model)).loss.backward()
    assert calls.counts == [1, 1]


def test_frozen_embeddings_as_with_adapters():
    """Only some weights train, and the layers' input needs no gradient."""
    model = built(llama)
    for name, p in model.named_parameters():
        p.requires_grad_("q_proj" in name)
    expected = step(model)
    with enable(model):
        assert_equal(step(model), expected)


def test_a_mistake_in_a_layer_is_found():
    """A hook that does something else in the replay: the layer is named."""
    model = built(mixtral)
    flips = []

    def flip(module, args):
        flips.append(1)
        return (args[0] * (1.0 + 0.5 * len(flips)),)

    layers_of(model)[0].mlp.register_forward_pre_hook(flip)
    with enable(model), pytest.raises(recollect.CheckpointError, match="MixtralDecoderLayer"):
        step(model)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"every_n_layers": 0}, ValueError, "every_n_layers must be a whole number from 1, got int 0"),
        ({"every_n_layers": "2"}, ValueError, "every_n_layers must be a whole number from 1, got str '2'"),
        ({"determinism_check": "all"}, ValueError, "determinism_check"),
        ({"policy": 3}, TypeError, "policy must be a policy"),
        ({"plan": {"**.attention": Save()}}, ValueError, "matches no module of GPT2LMHeadModel"),
    ],
)
def test_bad_input_changes_nothing(options, error, message):
    model = built(gpt2)
    before = [dict(vars(module)) for module in model.modules()]
    with pytest.raises(error, match=message):
        enable(model, **options)
    assert [dict(vars(module)) for module in model.modules()] == before


def test_what_is_no_model_of_transformers():
    with pytest.raises(TypeError, match=r"model must be a transformers\.PreTrainedModel, got Linear"):
        enable(nn.Linear(2, 2))
