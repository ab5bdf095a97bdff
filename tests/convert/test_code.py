"""quantise() on forward passes with unusual code: functions, views, writes in place, branches."""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import softstair as ss
from networks import Code, NormAct, without_exact_sums

TERNARY = ss.Stair.ternary()


def soft_linear(layer: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    return F.linear(x, TERNARY(layer.weight), layer.bias)


class OptionalMask(Code):
    def forward(self, x, mask=None):
        self.hidden = F.gelu(self.a(x))
        return self.b(self.hidden if mask is None else self.hidden * mask)


@pytest.mark.parametrize("example", [False, True])
def test_an_optional_argument_stays_optional(example):
    """Tracing does not fix ``if mask is not None``, and leaves nothing on the module."""
    x, mask = torch.randn(4, 6), torch.ones(8)
    model = OptionalMask(None)
    net = ss.quantise(model, TERNARY, TERNARY, example_inputs=(x,) if example else None)
    assert not hasattr(net, "hidden")
    torch.testing.assert_close(net(x), net(x, mask))


@pytest.mark.filterwarnings("ignore:all weights that are loaded")
def test_constants_made_in_forward_are_not_saved():
    model = Code(lambda m, x: m.b(F.relu(m.a(x)) * torch.arange(8.0)))
    net = ss.quantise(model, TERNARY, TERNARY).eval()
    net.load_state_dict(model.state_dict(), strict=True)
    x = torch.randn(4, 6)
    expected = soft_linear(net.b, TERNARY(soft_linear(net.a, x)) * torch.arange(8.0))
    torch.testing.assert_close(net(x), expected)


@pytest.mark.parametrize(
    "code",
    [
        lambda m, x: m.b(F.relu(m.a(x))) + torch.rand(3),
        lambda m, x: m.b(F.relu(m.a(x)) * (x.sum() if m.training else 1)),
        lambda m, x: m.b(F.relu(h := m.a(x), inplace=True) + h),
        lambda m, x: m.b(F.relu((h := m.a(x)).view(-1, 2, 4), inplace=True).flatten(1) + h),
        lambda m, x: (m.a(x).relu_(), m.b(m.a(x).relu_()))[1],
    ],
    ids=["random", "training", "in place", "in place on a view", "result unused"],
)
def test_code_that_cannot_be_rewritten_raises(code):
    with pytest.raises(ValueError, match="model"):
        ss.quantise(Code(code), TERNARY, TERNARY)


def test_a_hook_on_a_block_with_functional_activations_raises():
    model = nn.Sequential(Code(lambda m, x: m.b(F.relu(m.a(x)))))
    model[0].register_forward_hook(lambda *_: None)
    with pytest.raises(ValueError, match="hooks"):
        ss.quantise(model, TERNARY, TERNARY)


@pytest.mark.filterwarnings("ignore:all weights that are loaded")
def test_a_module_under_two_names_keeps_both():
    model = Code(lambda m, x: m.b(F.relu(m.c(F.relu(m.again(F.relu(m.a(x))))))), c=nn.Linear(8, 8))
    model.again = model.c
    net = ss.quantise(model, TERNARY, TERNARY)
    net.load_state_dict(model.state_dict(), strict=True)
    assert net.again is net.c
    rows = [(row.name, row.layer) for row in ss.report(net).rows if row.became == "stair weights"]
    assert rows == [("a", 0), ("c", 1), ("b", 3)]


def _multiply(h):
    h *= 0.375


def _assign(h):
    h[:, 0] = 0.375


def _multiply_each(h):
    for column in h.unbind(1):
        column.mul_(0.375)


def _replace_data(h):
    h.data = 0.375 * h


def _share_data(h):
    y = torch.zeros(1)
    y.data = h.data
    y.mul_(0.375)


WRITES = {
    "slice": lambda h: h[:, :4].mul_(0.375),
    "view": lambda h: h.view(-1, 2, 4).mul_(0.375),
    "operator": _multiply,
    "operator on a slice": lambda h: _multiply(h[:, 1:3]),
    "chunk": lambda h: h.chunk(2, 1)[1].add_(0.25),
    "transpose": lambda h: h.transpose(0, 1).mul_(0.375),
    "unsqueeze": lambda h: h.unsqueeze(1).clamp_(-0.25, 0.25),
    "detach": lambda h: h.detach().mul_(0.375),
    "operator on data": lambda h: _multiply(h.data),
    "out, a view": lambda h: torch.mul(h[:, :2], 0.375, out=h[:, :2]),
    "twice": lambda h: h.add_(h).mul_(0.375),
    "assignment": _assign,
    "loop": _multiply_each,
    "new data": _replace_data,
    "data of another tensor": _share_data,
}
NOT_TRACED = ("assignment", "loop", "new data")


@pytest.mark.parametrize("traced", [True, False])
@pytest.mark.parametrize("kind", WRITES)
def test_features_that_were_written_into_are_summed_as_they_are(kind, traced):
    torch.manual_seed(0)
    if traced and kind in NOT_TRACED:
        pytest.skip("torch.fx does not trace it")

    def code(m, x):
        h = m.act(m.a(x))
        if not traced and h.sum() < -1e9:
            return x
        WRITES[kind](h)
        return m.b(h)

    x = 3 * torch.randn(200, 6)
    net = ss.quantise(Code(code, act=nn.ReLU()), TERNARY, TERNARY, example_inputs=x).eval()
    with torch.no_grad():
        assert torch.equal(net(x), without_exact_sums(net)(x))


def _double(h):
    h += h


@pytest.mark.parametrize(
    ("write", "quantum", "widest"),
    [
        (lambda h: h[:, :4].neg_(), 1.0, 2),  # a bound: that of an addition
        (_double, 1.0, 2),
        (lambda h: h.add(0.5).mul_(2), 1.0, 1),
        (lambda h: h.mul_(0.5), None, None),
    ],
)
def test_a_write_leaves_the_quantum_that_the_features_have_then(write, quantum, widest):
    """What was read before is not affected; what is read afterwards has the new values."""

    def code(m, x):
        h = m.act(m.a(x))
        y = m.again(h)
        write(h)
        return m.b(h) + y

    model = Code(code, act=nn.ReLU(), again=nn.Linear(8, 3))
    net = ss.quantise(model, TERNARY, TERNARY)
    assert (net.again.input_quantum, net.again.widest_input) == (1.0, 1)
    assert net.b.input_quantum == quantum
    assert quantum is None or net.b.widest_input == widest


class AliasedActivation(Code):
    """A functional activation in code that adds to an alias of what it reads."""

    def forward(self, x):
        size = x.size(0)
        doubled = size
        doubled += size
        t = self.a(x)
        u = t
        u += x.sum(1, keepdim=True)
        return self.b(F.relu(t)).view(size, 3) + doubled


def test_an_addition_to_an_alias_stays_in_place_where_code_is_rewritten():
    torch.manual_seed(0)
    x = torch.randn(8, 6)
    net = ss.quantise(AliasedActivation(None), TERNARY, TERNARY).eval()
    stair = net.get_submodule("stair_relu")
    expected = net.b(stair(net.a(x) + x.sum(1, keepdim=True))) + 16
    for copied in (net, copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
        assert torch.equal(copied(x), expected)


def test_a_layer_behind_functional_dropout_knows_the_quantum_of_its_input():
    features = ss.Stair.linear(4, quantum=0.1)
    by_mode = Code(lambda m, x: m.b(F.dropout(F.relu(m.a(x)), training=m.training)))
    always = Code(lambda m, x: m.b(F.dropout(F.relu(m.a(x)))))
    quanta = [ss.quantise(m, TERNARY, features).b.input_quantum for m in (by_mode, always)]
    assert quanta == [0.1, None]


def test_names_of_new_modules_are_not_those_of_others():
    code = lambda m, x: m.b(m.stair_relu(F.relu(m.a(x))))
    model = Code(code, stair_relu=nn.Linear(8, 8))
    net = ss.quantise(model, TERNARY, TERNARY)
    assert type(net.stair_relu) is ss.nn.StairLinear
    assert type(net.stair_relu_) is ss.nn.StairActivation


def test_functional_dropout_follows_the_mode():
    x = torch.randn(64, 6)
    by_mode = Code(lambda m, x: m.b(F.dropout(F.relu(m.a(x)), p=0.5, training=m.training)))
    net = ss.quantise(by_mode.eval(), TERNARY, TERNARY)
    assert torch.equal(net(x), net(x))
    net.train()
    assert not torch.equal(net(x), net(x))
    never = Code(lambda m, x: m.b(F.dropout(F.relu(m.a(x)), 0.5, training=False)))
    net = ss.quantise(never, TERNARY, TERNARY)
    assert torch.equal(net(x), net(x))


def test_numbers_may_depend_on_the_mode():
    x = torch.randn(64, 6)
    model = Code(lambda m, x: m.b(F.relu(m.a(x))) * (2 if m.training else 1))
    net = ss.quantise(model, TERNARY, TERNARY, forward="hard")
    for copied in (net, copy.deepcopy(net)):
        assert torch.equal(copied.train()(x), 2 * copied.eval()(x))


def test_functional_normalisation_follows_the_mode():
    """The sum without an activation gets a stair, so that the code is rewritten."""
    torch.manual_seed(0)
    convolutions = [nn.Conv2d(2, 3, 1), nn.Conv2d(3, 3, 1)]
    norms = (nn.BatchNorm2d(3), nn.BatchNorm2d(3), nn.ReLU())
    plain = nn.Sequential(convolutions[0], norms[0], convolutions[1], *norms[1:])
    own = nn.Sequential(convolutions[0], NormAct(3, act=False), convolutions[1], NormAct(3))
    nets = [
        ss.quantise(model, TERNARY, TERNARY, options=ss.QuantiseOptions(init="keep"))
        for model in (plain, own)
    ]
    assert [ss.report(net).layers for net in nets] == [2, 2]
    for training in (True, True, False):
        x = torch.randn(4, 2, 5, 5)
        first, second = (net.train(training)(x) for net in nets)
        assert torch.equal(first, second)
    for name in ("running_mean", "running_var"):
        assert torch.equal(nets[0].get_buffer(f"3.{name}"), nets[1].get_buffer(f"3.{name}"))
    assert float(nets[1][1].running_var.std()) > 0


def test_an_activation_of_several_names_is_several_stairs():
    """No code is rewritten; a name that nothing calls stays as it is."""
    act = nn.ReLU()
    code = lambda m, x: m.b(m.body(m.a(x)))
    model = Code(code, act=act, body=nn.Sequential(act, nn.Linear(8, 8), act))
    net = ss.quantise(model, TERNARY, TERNARY)
    assert type(net) is Code
    assert (net.body[0].layer, net.body[2].layer) == (0, 1)
    assert type(net.act) is nn.ReLU
    assert len(net.body) == 3


@pytest.mark.parametrize(
    "options", [{"skip": "second"}, {"features": {"second": None, "*": TERNARY}}]
)
def test_one_name_of_an_activation_may_stay_in_float(options):
    act = nn.ReLU()
    code = lambda m, x: m.b(m.second(m.c(m.first(m.a(x)))))
    model = Code(code, first=act, c=nn.Linear(8, 8), second=act)
    net = ss.quantise(model, TERNARY, **{"features": TERNARY, **options})
    assert type(net.first) is ss.nn.StairActivation
    assert type(net.second) is nn.ReLU


def test_a_layer_is_skipped_by_each_of_its_names():
    layer = nn.Linear(8, 8)
    model = Code(
        lambda m, x: m.b(m.act(m.second(m.a(x)))), first=layer, second=layer, act=nn.ReLU()
    )
    for name in ("first", "second", "sec*"):
        net = ss.quantise(model, TERNARY, TERNARY, skip=name)
        assert type(net.first) is type(net.second) is nn.Linear


def test_an_activation_with_parameters_that_stays_in_float_is_shared_as_before():
    act = nn.PReLU()
    code = lambda m, x: m.b(m.second(m.c(m.first(m.a(x)))))
    model = Code(code, first=act, c=nn.Linear(8, 8), second=act)
    net = ss.quantise(model, TERNARY)
    assert net.first is net.second
    assert ss.quantise(model, TERNARY, TERNARY)(torch.randn(2, 6)).shape == (2, 3)


def test_calls_that_are_only_run_share_a_stair_and_are_reported():
    code = lambda m, x: m.b(m.act(m.c(h))) if (h := m.act(m.a(x))).sum() > -1e9 else h
    model = Code(code, act=nn.ReLU(), c=nn.Linear(8, 8))
    net = ss.quantise(model, TERNARY, TERNARY, example_inputs=torch.randn(2, 6))
    rows = {row.name: row.became for row in ss.report(net).rows}
    assert rows["act"] == "ternary stair instead of ReLU, one for 2 calls"


def test_one_call_of_an_activation_may_stay_in_float():
    torch.manual_seed(0)
    code = lambda m, x: m.b(m.act(m.c(m.act(m.a(x)))))
    model = Code(code, act=nn.ReLU(), c=nn.Linear(8, 8))
    net = ss.quantise(model, TERNARY, {0: None, "*": TERNARY}).eval()
    assert type(net.act) is nn.ReLU
    x = torch.randn(4, 6)
    hidden = TERNARY(soft_linear(net.c, soft_linear(net.a, x).relu()))
    torch.testing.assert_close(net(x), soft_linear(net.b, hidden))


def test_a_traced_network_and_its_copies_are_quantised():
    model = torch.fx.symbolic_trace(Code(lambda m, x: m.b(F.relu(m.a(x)))))
    net = ss.quantise(model, TERNARY, TERNARY).eval()
    x = torch.randn(4, 6)
    expected = soft_linear(net.b, TERNARY(soft_linear(net.a, x)))
    torch.testing.assert_close(copy.deepcopy(net)(x), expected)


def test_a_forward_pass_set_on_the_model_needs_example_inputs():
    """torch.fx would trace that of the class."""
    model = Code(lambda m, x: m.b(m.a(x)), act=nn.ReLU())
    model.forward = lambda x: model.b(model.act(model.a(x)))
    with pytest.raises(ValueError, match="example_inputs"):
        ss.quantise(model, TERNARY, TERNARY)


def test_inputs_given_by_name():
    code = lambda m, x: m.b(input=m.act(input=m.a(input=x)))
    net = ss.quantise(Code(code, act=nn.ReLU()), TERNARY, TERNARY).eval()
    x = torch.randn(4, 6)
    torch.testing.assert_close(net(x), soft_linear(net.b, TERNARY(soft_linear(net.a, x))))


def test_a_functional_network_keeps_its_attributes_and_containers():
    def code(m, x):
        h = F.relu(m.a(x))
        for block in m.blocks:
            h = F.relu(block(h))
        return m.b(h)

    model = Code(code, blocks=nn.ModuleList([nn.Linear(8, 8)]))
    model.classes = 3
    net = ss.quantise(model, TERNARY, TERNARY)
    assert net.classes == 3
    assert isinstance(net.blocks[0], ss.nn.StairLinear)


@pytest.mark.parametrize(
    "added",
    [
        lambda m, h, x: h + m.p,
        lambda m, h, x: h + x[:, :1],
        lambda m, h, x: h - torch.full((8,), 0.2),
    ],
)
def test_a_run_does_not_round_values_that_are_no_features(added):
    """Parameters, inputs and constants added to features are not rounded to the quantum."""
    features, x = ss.Stair.ternary(0.5), torch.randn(5, 6)
    code = lambda m, x: m.b(added(m, h, x) if (h := m.act(m.a(x))).sum() < 1e9 else h)
    model = Code(code, act=nn.ReLU(), p=nn.Parameter(torch.full((8,), 0.3)))
    net = ss.quantise(model, TERNARY, features, example_inputs=x).eval()
    hidden = features(soft_linear(net.a, x))
    torch.testing.assert_close(net(x), soft_linear(net.b, added(net, hidden, x)))


@pytest.mark.parametrize("is_read_again", [False, True])
def test_an_activation_in_place_that_is_only_run_must_return_what_is_read(is_read_again):
    """A stair writes into nothing: code that reads the input again would see other values."""

    def code(m, x):
        h = m.a(x)
        y = m.act(h)
        return m.b(h if is_read_again else y) if y.sum() > -1e9 else y

    model = Code(code, act=nn.ReLU(inplace=True))
    if is_read_again:
        with pytest.raises(ValueError, match="act works in place"):
            ss.quantise(model, TERNARY, TERNARY, example_inputs=torch.randn(2, 6))
    else:
        net = ss.quantise(model, TERNARY, TERNARY, example_inputs=torch.randn(2, 6))
        assert type(net.act) is ss.nn.StairActivation
    assert model.act.inplace


def test_layers_of_code_that_is_only_run_are_those_of_traced_code():
    def code(m, x):
        y = m.b(m.act(m.c(m.first(m.a(x)))))
        return y if not m.branches or y.sum() > -1e9 else x

    layers = []
    for branches in (False, True):
        model = Code(code, first=nn.ReLU(), c=nn.Linear(8, 8), act=nn.ReLU())
        model.branches = branches
        modes = [module.train(name != "act").training for name, module in model.named_modules()]
        net = ss.quantise(model, TERNARY, TERNARY, example_inputs=torch.randn(2, 6))
        layers.append([(row.name, row.layer) for row in ss.report(net).rows])
        assert [module.training for module in model.modules()] == modes
        assert not any(m._forward_hooks or m._forward_pre_hooks for m in net.modules())
    assert layers[0] == layers[1] == [("a", 0), ("first", 0), ("c", 1), ("act", 1), ("b", 2)]


def test_results_kept_as_attributes_keep_their_gradient():
    """The hidden result may be part of a loss elsewhere."""

    def code(m, x):
        m.hidden = m.a(x)
        return m.b(m.act(m.hidden))

    net = ss.quantise(Code(code, act=nn.ReLU()), TERNARY, TERNARY, skip="b")
    assert not hasattr(net, "hidden")
    ss.Annealer(net, lambda layer, t: (0.0, 0.0)).step()
    net(torch.randn(4, 6))
    assert net.hidden.requires_grad
