"""convert_model on dense models, on lists of experts and on a user's own kind of experts."""

import copy

import pytest
import torch
from support import RECIPES, assert_all_same, assert_same, calc_diff, normal
from torch import nn

import blockscale as bs

MX, NV = RECIPES["mxfp8"], RECIPES["nvfp4_plain"]


class Dense(nn.Module):
    """A head tied to an embedding, one layer used twice, a layer with a bias."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(50, 32)
        self.up = nn.Linear(32, 64)
        self.down = nn.Linear(64, 32, bias=False)
        self.again = self.up
        self.head = nn.Linear(32, 50, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids):
        x = self.embedding(ids)
        x = x + self.down(torch.relu(self.up(x)))
        x = x + self.down(torch.relu(self.again(x)))
        return self.head(x)


def dense(seed=0):
    torch.manual_seed(seed)
    return Dense()


IDS = torch.arange(24).view(2, 12)


def grads(model, *args):
    model.zero_grad()
    y = model(*args)
    y = y[0] if isinstance(y, tuple) else y
    y.backward(normal(*y.shape, seed=1))
    return {"y": y.detach(), **{n: p.grad for n, p in model.named_parameters()}}


def test_a_dense_model_keeps_everything_but_its_arithmetic():
    model = dense()
    plain = grads(model, IDS)
    before, names = dict(model.named_parameters()), list(model.state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen = []
    hooks = [model.up.register_forward_hook(lambda m, a, y: seen.append(type(m).__name__))]
    hooks.append(model.up.register_forward_pre_hook(lambda m, a: seen.append("pre")))
    assert bs.convert_model(model, MX) is model
    assert {n: id(p) for n, p in model.named_parameters()} == {n: id(p) for n, p in before.items()}
    assert list(model.state_dict()) == names
    assert model.head.weight is model.embedding.weight
    assert model.again is model.up
    assert bs.nn.converted_modules(model) == {"up": MX, "down": MX, "head": MX}

    got = grads(model, IDS)
    assert seen == ["pre", "Linear"] * 2
    for name, t in plain.items():
        assert 0.001 < calc_diff(got[name], t) < 0.15, name
    optimizer.step()
    assert calc_diff(grads(model, IDS)["y"], got["y"]) > 0.01
    hooks[0].remove()
    hooks[1].remove()
    seen.clear()
    model(IDS)
    assert seen == []


def test_bits_are_those_of_the_layers():
    model = bs.convert_model(dense(), MX)
    want = grads(model, IDS)
    other = dense()
    for name in ("up", "down", "head"):
        old = getattr(other, name)
        new = bs.nn.Linear(old.in_features, old.out_features, old.bias is not None, recipe=MX)
        new.weight, new.bias = old.weight, old.bias
        setattr(other, name, new)
    other.again = other.up
    got = grads(other, IDS)
    assert_same(got["y"], want["y"])
    for name in ("up.weight", "up.bias", "down.weight"):
        assert_same(got[name], want[name], name)


def test_restore_is_the_inverse():
    model = dense()
    want = grads(model, IDS)
    bs.convert_model(model, MX)
    assert bs.restore_model(model) is model
    assert type(model.up) is nn.Linear
    assert bs.nn.converted_modules(model) == {}
    assert model.up.__dict__.keys() == dense().up.__dict__.keys()
    assert_all_same(grads(model, IDS), want)


def test_filter_chooses_layers_and_recipes():
    asked = []

    def choose(name, module):
        asked.append(name)
        return {"up": True, "down": NV, "head": False}[name]

    model = bs.convert_model(dense(), MX, choose)
    assert asked == ["up", "down", "head"]
    assert bs.nn.converted_modules(model) == {"up": MX, "down": NV}
    assert type(model.head) is nn.Linear
    bs.convert_model(model, RECIPES["bf16"], lambda name, m: name == "down")  # once more: other recipes
    assert bs.nn.converted_modules(model) == {"up": MX, "down": RECIPES["bf16"]}
    bs.restore_model(model)
    assert type(model.down) is nn.Linear


def test_autocast_decides_without_a_recipe():
    model, fixed = bs.convert_model(dense(), None), bs.convert_model(dense(), MX)
    with bs.autocast(MX):
        inside = grads(model, IDS)
    assert_all_same(inside, grads(fixed, IDS))
    assert calc_diff(inside["y"], grads(model, IDS)["y"]) > 0.001


def test_a_linear_by_itself_copies_and_state_dicts():
    layer = nn.Linear(8, 4)
    assert bs.convert_model(layer, MX) is layer
    model = bs.convert_model(dense(), MX)
    twin = copy.deepcopy(model)
    assert twin.up.weight is not model.up.weight
    assert_all_same(grads(twin, IDS), grads(model, IDS))
    fresh = dense(3)
    fresh.load_state_dict(model.state_dict())
    assert_same(bs.convert_model(fresh, MX)(IDS), model(IDS))


def test_a_converted_model_compiles():
    torch._dynamo.reset()
    model = bs.convert_model(dense(), MX)
    want = grads(model, IDS)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    model.zero_grad()
    y = compiled(IDS)
    y.backward(normal(*y.shape, seed=1))
    assert_all_same({"y": y.detach(), **{n: p.grad for n, p in model.named_parameters()}}, want)


def test_what_is_left_alone():
    class Scaled(nn.Linear):
        def forward(self, input):
            return 2 * super().forward(input)

    model = nn.Sequential(Scaled(4, 4), nn.Linear(4, 4))
    bs.convert_model(model, MX)
    assert list(bs.nn.converted_modules(model)) == ["1"]
    bank = nn.Module()
    bank.w = nn.Parameter(torch.ones(2, 3, 4))
    with pytest.warns(UserWarning, match=r"1: Module has 3-D parameters and no adapter knows it"):
        bs.convert_model(nn.Sequential(nn.Linear(4, 4), bank), MX)


@pytest.mark.parametrize(
    ("error", "call", "message"),
    [
        (TypeError, lambda: bs.convert_model("model", MX), "model is str"),
        (TypeError, lambda: bs.convert_model(dense(), "mxfp8"), "recipe is str"),
        (TypeError, lambda: bs.convert_model(dense(), MX, lambda n, m: "yes"), r"filter\('up', ...\) is str; a bool or a Recipe"),
        (ValueError, lambda: bs.convert_model(nn.ReLU(), MX), "nothing to convert in ReLU"),
        (ValueError, lambda: bs.convert_model(dense(), MX, lambda n, m: False), "nothing to convert in Dense"),
        (ValueError, lambda: bs.nn.unregister_adapter(bs.nn.Adapter("mine", bool, print)), "'mine' is not registered"),
    ],
)
def test_errors(error, call, message):
    with pytest.raises(error, match=message):
        call()


# experts as a list of modules, under the names that transformers 4 gives them


class Expert(nn.Module):
    def __init__(self, hidden, intermediate):
        super().__init__()
        self.gate_proj = nn.Linear(hidden, intermediate, bias=False)
        self.up_proj = nn.Linear(hidden, intermediate, bias=False)
        self.down_proj = nn.Linear(intermediate, hidden, bias=False)
        self.act_fn = nn.SiLU()

    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class Qwen3MoeSparseMoeBlock(nn.Module):
    """Softmax over all experts, the top k normalised; every expert on every token, weighted."""

    def __init__(self, hidden=32, intermediate=48, num_experts=5, top_k=2):
        super().__init__()
        self.top_k, self.norm_topk_prob = top_k, True
        self.gate = nn.Linear(hidden, num_experts, bias=False)
        self.experts = nn.ModuleList(Expert(hidden, intermediate) for _ in range(num_experts))

    def forward(self, hidden_states):
        x = hidden_states.reshape(-1, hidden_states.shape[-1])
        logits = self.gate(x)
        probs, ids = torch.topk(torch.softmax(logits, 1), self.top_k, 1)
        dense_probs = torch.zeros_like(logits).scatter(1, ids, probs / probs.sum(1, keepdim=True))
        y = sum(dense_probs[:, e, None] * expert(x) for e, expert in enumerate(self.experts))
        return y.view(hidden_states.shape), logits


def test_a_list_of_experts():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 32), Qwen3MoeSparseMoeBlock())
    x = normal(2, 30, 32, seed=1)
    plain = grads(model, x)
    block = model[1]
    bs.convert_model(model, RECIPES["bf16"])
    assert bs.nn.converted_modules(model) == {"0": RECIPES["bf16"], "1": RECIPES["bf16"]}
    assert isinstance(block, Qwen3MoeSparseMoeBlock)
    assert type(block.gate) is nn.Linear
    assert type(block.experts[0].up_proj) is nn.Linear
    got = grads(model, x)
    for name, t in plain.items():
        assert calc_diff(got[name], t) < 0.015, name
    y, logits = block(model[0](x))
    assert logits.shape == (60, 5)

    # the experts by hand, from the routing of the block
    with torch.no_grad():
        inner = model[0](x).reshape(-1, 32)
        probs, ids = torch.topk(torch.softmax(block.gate(inner), 1), 2, 1)
        rows = bs.permute(inner, ids, 5, probs / probs.sum(1, keepdim=True))
        w1 = torch.stack([torch.cat((e.gate_proj.weight, e.up_proj.weight)) for e in block.experts])
        w2 = torch.stack([e.down_proj.weight for e in block.experts])
        by_hand = bs.grouped_mlp(rows.x, w1, w2, rows.offsets, probs=rows.probs)
        assert_same(y.detach().flatten(0, 1), bs.unpermute(by_hand, rows.row_map))
    bs.restore_model(model)
    assert type(block) is Qwen3MoeSparseMoeBlock
    assert_all_same(grads(model, x), plain)


class Bank(nn.Module):
    """A user's own experts: (E, I, H) up and (E, I, H) down, squared ReLU, chosen outside."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Parameter(normal(3, 16, 8, seed=1)), nn.Parameter(normal(3, 16, 8, seed=2))

    def forward(self, x, ids, probs):
        h = torch.relu(torch.einsum("th,tkih->tki", x, self.up[ids])) ** 2
        return torch.einsum("tki,tkih,tk->th", h, self.down[ids], probs)


def test_a_users_adapter():
    def forward(module, recipe, x, ids, probs):
        weights = bs.nn.ExpertWeights(module.up, module.down.mT, activation="squared_relu")
        return bs.nn.run_experts(x, ids, probs, weights, recipe)

    x, ids, probs = normal(20, 8, seed=3), torch.arange(40).view(20, 2) % 3, torch.rand(20, 2)
    bank = Bank()
    plain = grads(bank, x, ids, probs)
    adapter = bs.nn.register_adapter(bs.nn.Adapter("bank", lambda m: isinstance(m, Bank), forward))
    try:
        bs.convert_model(bank, RECIPES["bf16"])
    finally:
        bs.nn.unregister_adapter(adapter)
    got = grads(bank, x, ids, probs)
    for name, t in plain.items():
        assert 0 < calc_diff(got[name], t) < 0.02, name
    bs.convert_model(bank, MX)  # it is known still
    assert calc_diff(grads(bank, x, ids, probs)["y"], got["y"]) > 0.01
    assert type(bs.restore_model(bank)) is Bank
