"""convert_model on transformers' own models, made from their configurations with random weights."""

import pytest
import torch
from support import RECIPES, assert_all_same, assert_same, calc_diff

import blockscale as bs

transformers = pytest.importorskip("transformers")
# transformers 4 keeps lists of experts; their adapter is tested in test_convert_model.py
if int(transformers.__version__.split(".")[0]) < 5:
    pytest.skip("fused experts came with transformers 5", allow_module_level=True)

SMALL = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}


def qwen3_moe(seed=0, **options):
    torch.manual_seed(seed)
    experts = {"moe_intermediate_size": 48, "intermediate_size": 96, "num_experts": 6, "num_experts_per_tok": 2}
    config = transformers.Qwen3MoeConfig(**(SMALL | experts | {"norm_topk_prob": True, "vocab_size": 128} | options))
    return transformers.Qwen3MoeForCausalLM(config)


def gpt_oss(seed=0, **options):
    torch.manual_seed(seed)
    experts = {"intermediate_size": 48, "num_local_experts": 6, "num_experts_per_tok": 2}
    config = transformers.GptOssConfig(**(SMALL | experts | {"vocab_size": 128, "pad_token_id": 0} | options))
    return transformers.GptOssForCausalLM(config)


#: one layer of experts each: a second one would route a few tokens elsewhere for a rounding in the first
MODELS = {
    "qwen3_moe": lambda: qwen3_moe(num_hidden_layers=1),
    "qwen3_moe_mixed": lambda: qwen3_moe(mlp_only_layers=[0]),
    "gpt_oss": lambda: gpt_oss(num_hidden_layers=1),
}
IDS = torch.randint(1, 128, (2, 24), generator=torch.Generator().manual_seed(1))


def step(model):
    model.zero_grad()
    out = model(input_ids=IDS, labels=IDS)
    out.loss.backward()
    return {"logits": out.logits.detach(), **{n: p.grad for n, p in model.named_parameters()}}


@pytest.mark.parametrize("name", MODELS)
def test_the_network_is_the_same(name):
    """Experts alone, in bfloat16 operands, against the model's own float32 loop over experts."""
    model = MODELS[name]()
    with torch.no_grad():  # biases are zero at first, and so small weights leave their mark
        for n, p in model.named_parameters():
            if "experts" in n:
                p.add_(torch.randn(p.shape, generator=torch.Generator().manual_seed(len(n))), alpha=0.1)
    want = step(model)
    classes = {n: type(m) for n, m in model.named_modules()}
    keys = list(model.state_dict())
    bs.convert_model(model, RECIPES["bf16"], lambda n, m: n.endswith("experts"))
    converted = bs.nn.converted_modules(model)
    assert list(converted) == [n for n in classes if n.endswith("experts")]
    assert list(model.state_dict()) == keys
    assert all(isinstance(m, classes[n]) for n, m in model.named_modules())
    got = step(model)
    experts = [n for n in want if "experts" in n]
    assert len(experts) == (4 if name == "gpt_oss" else 2)
    for n in ("logits", *experts):
        assert 0 < calc_diff(got[n], want[n]) < 0.03, n
    bs.restore_model(model)
    assert {n: type(m) for n, m in model.named_modules()} == classes
    assert_all_same(step(model), want)


def test_the_whole_model_in_each_recipe():
    exact = step(qwen3_moe())
    for name, bound in {"bf16": 0.02, "mxfp8": 0.15, "fp8_block": 0.15, "fp8_current": 0.15, "nvfp4": 0.5}.items():
        model = bs.convert_model(qwen3_moe(), RECIPES[name], lambda n, m: n != "lm_head")
        assert len(bs.nn.converted_modules(model)) == 2 * (4 + 1)
        got = step(model)
        assert bound / 40 < calc_diff(got["logits"], exact["logits"]) < bound, name
        assert all(t.abs().sum() > 0 for t in got.values()), name


def test_experts_by_hand():
    model = bs.convert_model(qwen3_moe(), RECIPES["mxfp8"])
    experts = model.model.layers[0].mlp.experts
    x, ids, probs = torch.randn(30, 64), torch.arange(60).view(30, 2) % 6, torch.rand(30, 2)
    rows = bs.permute(x, ids, 6, probs)
    args = (experts.gate_up_proj, experts.down_proj, rows.offsets)
    want = bs.unpermute(bs.grouped_mlp(rows.x, *args, probs=rows.probs, recipe=RECIPES["mxfp8"]), rows.row_map)
    assert_same(experts(x, ids, probs), want)


def test_compiles_without_a_break():
    torch._dynamo.reset()
    model = bs.convert_model(qwen3_moe(), RECIPES["mxfp8"])
    experts = model.model.layers[0].mlp.experts
    x, ids, probs = torch.randn(30, 64), torch.arange(60).view(30, 2) % 6, torch.rand(30, 2)
    compiled = torch.compile(experts, fullgraph=True, backend="aot_eager")
    assert_same(compiled(x, ids, probs), experts(x, ids, probs))


def test_save_and_load(tmp_path):
    model = bs.convert_model(qwen3_moe(), RECIPES["mxfp8"])
    model.save_pretrained(tmp_path)
    plain = transformers.Qwen3MoeForCausalLM.from_pretrained(tmp_path)
    assert_all_same(dict(plain.state_dict()), dict(model.state_dict()))
    assert_same(bs.convert_model(plain, RECIPES["mxfp8"])(input_ids=IDS).logits, model(input_ids=IDS).logits)
