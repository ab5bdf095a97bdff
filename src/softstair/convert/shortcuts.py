"""Stairs for sums that no activation quantises, and stairs of their own for shortcuts.

In integers, weights read quantised features, and of two terms that are added at most one is a sum
of weights that no stair has quantised. For such a sum s and a quantised feature n, the stair of
s + n has integer thresholds on s, other ones for each n. For two such sums, each with a scale of
its own, it has none: rounding decides, and there are too many pairs to list. So a stair is put on

==========  ===================================================================================
``sums``    where
==========  ===================================================================================
"sum"       one of two sums that are added (the one with fewer layers before it: the shortcut),
            and on what reaches weights, or another addition, without an activation
"branches"  every sum that is added, and on what reaches weights without an activation
==========  ===================================================================================

A value that has no exact integer form in any case, such as the output of a LayerNorm, gets none.

With ``shortcuts``, features that are added have a stair of their own, of more levels. Weights read
them through a second stair, that of the layer's features; sums and averages of them are read as
they are:

    a = shortcuts(x),  y = weights · features(a),  next x = y + a
"""

from collections.abc import Container, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum, auto

from torch import nn

from softstair import _check
from softstair.convert.graph import SIZE_FUNCTIONS, Graph, GraphStep, unused_name
from softstair.convert.ops import Effect, Operator, called, operator_named
from softstair.convert.options import LayerOptions, Sums
from softstair.convert.sites import Model, Site, why_float
from softstair.stair import Stair

SUM = Operator("sum", Effect.ACTIVATION)
PRODUCT = Operator("product", Effect.ACTIVATION)
INPUT = Operator("input", Effect.ACTIVATION)
"""The rows of stairs that are added to a network: to sums, to products, and to the inputs of
weights."""
ARITHMETIC = ("add", "sub", "neg", "mul", "div")
AVERAGES = ("avg_pool", "adaptive_avg_pool", "mean")
LOWEST, HIGHEST = -128, 127


class _Kind(Enum):
    QUANTISED = auto()
    SUM = auto()  # of weights
    TOTAL = auto()  # a sum to which features were added, a product, features plus a constant
    CONSTANT = auto()  # a parameter, a number or a size
    FLOAT = auto()  # anything else


@dataclass(frozen=True)
class _Value:
    """The result of a step; a stair after step ``place`` quantises it."""

    kind: _Kind
    place: int
    depth: int = 0  # layers with weights before it, on the longest path

    @property
    def is_pending(self) -> bool:
        return self.kind in (_Kind.SUM, _Kind.TOTAL)


def sum_sites(model: Model, sites: Sequence[Site], options: LayerOptions) -> list[Site]:
    """Return a site for each stair that is added after a step."""
    net, graph, sums = model.net, model.graph, options.rare.sums
    if sums is None or not graph.complete or isinstance(model.traces, str):
        return []  # the forward pass cannot be rewritten
    modules = {site.module for site in sites if not site.why_float}
    kept = {use for site in sites if site.why_float for use in site.uses}
    places = _Walk(net, graph, modules, kept, sums).places()
    # Evaluation is what is exported; training may have more heads.
    if not places or not _Walk(net, model.traces.eval_steps, modules, (), sums).places():
        return []
    added, names = [], {name for name, _ in net.named_modules()}
    for place in sorted(places):
        module = graph.steps[place].module
        name = unused_name(f"{module}.stair" if module else model.call_names[place], names)
        row = PRODUCT if operator_named(graph.steps[place].function).name == "mul" else SUM
        site = Site(place, name, row, None, [place], is_call=True, is_added=True)
        site.why_float = why_float(site, graph, options) or ""
        added.append(site)
    return added


def input_sites(model: Model, sites: Sequence[Site]) -> list[Site]:
    """Set ``is_shortcut`` of the stairs whose features are added; return a site for each second
    stair, through which weights read these features.

    Features that are concatenated, or added to such features, are left out: they share a quantum.
    """
    if not model.graph.complete:
        problem = "must be None, since torch.fx cannot trace all of this model"
        raise _check.invalid("shortcuts", problem)
    stairs = {use: s for s in sites if s.is_activation and not s.why_float for use in s.uses}
    weights = {use: s for s in sites if s.is_weights and not s.why_float for use in s.uses}
    held: list[frozenset[Site]] = []  # the stairs whose features a step returns, added or joined
    same: list[Site | None] = []  # the stair whose features it returns as they are
    added, joined = list[frozenset[Site]](), set[Site]()
    read: dict[tuple[int, Site], list[int]] = {}
    for number, step in enumerate(model.graph.steps):
        effect = called(model.net, step)[1].effect
        inputs = frozenset[Site]().union(*(held[source] for source in step.inputs))
        first = same[step.inputs[0]] if step.inputs else None
        if effect is Effect.ADD:
            added.append(inputs)
        elif effect is Effect.JOIN:
            joined |= inputs
        elif number in weights and first is not None:
            read.setdefault((step.inputs[0], first), []).append(number)
        stair = stairs.get(number)
        moves = effect in (Effect.PASS, Effect.DROPOUT, Effect.MOVE)
        is_sum = effect in (Effect.WEIGHTS, Effect.ACTIVATION)
        held.append(frozenset({stair}) if stair else frozenset() if is_sum else inputs)
        same.append(stair or (first if moves else None))
        for written in step.written:  # it holds other values from here on
            held[written], same[written] = held[number], None
    for _ in added:
        joined.update(*(group for group in added if group & joined))
    for site in frozenset[Site]().union(*added) - joined:
        site.is_shortcut = True
    new, names = [], {name for name, _ in model.net.named_modules()}
    for (place, source), readers in read.items():
        if source.is_shortcut:
            name = unused_name(f"{weights[readers[0]].name}.input_stair", names)
            site = Site(source.step, name, INPUT, None, is_call=True, is_added=True)
            site.source, site.place, site.readers = source, place, tuple(readers)
            new.append(site)
    return new


def widen(sites: list[Site], shortcuts: Stair) -> None:
    """Set the stairs of shortcuts to ``shortcuts`` where it has more levels.

    Their former stairs become those of the second stairs; second stairs without use are removed.
    """
    narrow: dict[Site, Stair] = {}
    for site in [site for site in sites if site.is_shortcut and not site.why_float]:
        stair, wide = site.stair, shortcuts
        assert stair is not None
        if stair.levels[0] < 0:
            wide = signed(shortcuts)
        elif shortcuts.levels[0] < 0:
            allowed = "a stair without negative levels, such as uint8, if features have none"
            raise _check.wrong("shortcuts", shortcuts, allowed)
        site.is_shortcut = len(wide) > len(stair)
        if site.is_shortcut:
            narrow[site], site.stair = stair, wide
    if not narrow:
        problem = f"must be None, but a stair of {len(shortcuts)} levels was given: this network "
        problem += "adds no quantised features with fewer levels (concatenated ones do not count)"
        raise _check.invalid("shortcuts", problem)
    quantised = {
        use for site in sites if site.is_weights and not site.why_float for use in site.uses
    }
    for site in [site for site in sites if site.source]:
        source = site.source
        site.readers = tuple(reader for reader in site.readers if reader in quantised)
        if source in narrow and site.readers:
            site.stair, site.noise = narrow[source], source.noise
        else:
            sites.remove(site)


@dataclass(frozen=True)
class _Walk:
    """The search for sums that need a stair, by passes over a graph until none is added.

    Calls of ``modules`` are quantised, and so are functional activations, except for the steps
    ``kept``.
    """

    net: nn.Module
    graph: Graph
    modules: Container[nn.Module | None]
    kept: Container[int]
    sums: Sums
    needed: set[int] = field(default_factory=set)

    def places(self) -> set[int]:
        """Return the steps whose results need a stair that there is not."""
        before = -1
        while len(self.needed) > before:
            before, values = len(self.needed), list[_Value]()
            for number, step in enumerate(self.graph.steps):
                value = self._result(number, step, [values[source] for source in step.inputs])
                if number in self.needed:
                    value = replace(value, kind=_Kind.QUANTISED)
                values.append(value)
        return self.needed

    def _result(self, number: int, step: GraphStep, x: list[_Value]) -> _Value:
        if not x:  # the input of the network is bytes
            return _Value(_Kind.CONSTANT if number else _Kind.QUANTISED, number)
        module, operator = called(self.net, step)
        kinds = {value.kind for value in x}
        if step.function in SIZE_FUNCTIONS or kinds == {_Kind.CONSTANT}:
            return _Value(_Kind.CONSTANT, number)
        depth, effect = max(value.depth for value in x), operator.effect
        other = _Value(_Kind.FLOAT, number, depth)
        is_quantised = module in self.modules and number not in self.kept
        if effect is Effect.ACTIVATION and is_quantised:
            return replace(other, kind=_Kind.QUANTISED)
        if (effect is Effect.WEIGHTS and is_quantised) or operator.name == "linear":
            is_sum = self._quantised(x[0]).kind is _Kind.QUANTISED and is_quantised
            return _Value(_Kind.SUM if is_sum else _Kind.FLOAT, number, depth + 1)
        if operator.name in ARITHMETIC:
            return self._arithmetic(number, step, operator.name, x)
        if effect is Effect.JOIN or operator.name.startswith(AVERAGES):
            if not kinds.isdisjoint({_Kind.FLOAT, _Kind.CONSTANT}):
                return other
            for value in x:
                self._quantised(value)
            return replace(other, kind=_Kind.QUANTISED)
        if effect in (Effect.PASS, Effect.DROPOUT, Effect.MOVE):
            return x[0]
        if operator.name in ("relu", "batch_norm") and x[0].is_pending:
            return replace(x[0], place=number)
        if operator.name == "batch_norm" and x[0].kind is _Kind.QUANTISED:
            return replace(other, kind=_Kind.TOTAL)
        return other

    def _arithmetic(self, number: int, step: GraphStep, name: str, x: list[_Value]) -> _Value:
        """Return the sum or product of values, of which some may be constants."""
        terms = [value for value in x if value.kind is not _Kind.CONSTANT]
        has_constant = len(terms) < len(x) or step.has_numbers or name == "neg"
        total = _Value(_Kind.TOTAL, number, max(term.depth for term in terms))
        is_float = any(term.kind is _Kind.FLOAT for term in terms)
        is_float |= has_constant and len(terms) > 1  # with `out` or `alpha`
        # The network's input is given another scale before it is read.
        if is_float or (terms[0].place == 0 if has_constant else name == "div"):
            return replace(total, kind=_Kind.FLOAT)
        if not has_constant:
            terms = terms * 2 if len(terms) == 1 else terms
            if name != "mul":
                return self._total(number, terms)
            for term in terms:
                self._quantised(term)
            return total
        (term,) = terms
        if term.is_pending:
            return replace(term, place=number)
        is_scaled = len(x) == 1 and name not in ("add", "sub")  # a multiple of another quantum
        return replace(total, kind=term.kind) if is_scaled else total

    def _total(self, number: int, terms: list[_Value]) -> _Value:
        result = _Value(_Kind.TOTAL, number, max(term.depth for term in terms))
        if any(term.kind is _Kind.FLOAT for term in terms):
            return replace(result, kind=_Kind.FLOAT)
        if self.sums == "branches":
            terms = [self._quantised(term) for term in terms]
        terms = [self._quantised(term) if term.kind is _Kind.TOTAL else term for term in terms]
        pending = [term for term in terms if term.is_pending]
        if len(pending) == len(terms):
            # Of equally deep ones the last, as in sums(x) + shortcut(x).
            pending = sorted(reversed(pending), key=lambda term: term.depth)
            for term in pending[: -1 if pending[0] != pending[-1] else None]:
                self._quantised(term)
                pending.remove(term)
        return result if pending else replace(result, kind=_Kind.QUANTISED)

    def _quantised(self, x: _Value) -> _Value:
        """Return a value with a stair, unless it is quantised or float."""
        if not x.is_pending:
            return x
        # What another view still reads cannot be replaced.
        if not (self.graph.steps[x.place].written and self.graph.is_read_elsewhere(x.place)):
            self.needed.add(x.place)
        return replace(x, kind=_Kind.QUANTISED)


def signed(stair: Stair) -> Stair:
    """Return a stair of features with levels below 0, for sums that no activation precedes.

    Evenly spaced levels 0, ε, …, Kε are continued to −Kε, within what 8 bits hold: 0 … 15 becomes
    −15 … 15, and 0 … 255 becomes −128 … 127. Others are mirrored at 0.

    >>> signed(Stair.linear(2, quantum=0.5)).levels
    (-1.5, -1.0, -0.5, 0.0, 0.5, 1.0, 1.5)
    >>> signed(Stair((0.0, 1.0, 4.0), (0.5, 2.5))).thresholds
    (-2.5, -0.5, 0.5, 2.5)
    """
    if stair.levels[0] < 0:
        return stair
    unit = stair.with_quantum(1.0)
    if unit.integers is not None and unit.spacing is not None:
        first, second, *_ = unit.integers
        lowest, highest = max(-unit.integers[-1], LOWEST), min(unit.integers[-1], HIGHEST)
        step = second - first
        levels = range(first - (first - lowest) // step * step, highest + 1, step)
        gap, _ = unit.spacing
        thresholds = [unit.thresholds[0] + gap * (n - second) / step for n in levels[1:]]
        return Stair(tuple(levels), tuple(thresholds)).with_quantum(stair.quantum, stair.axis)
    middle = (0.0,) if stair.levels[0] > 0 else ()
    mirrored = [-level for level in reversed(stair.levels) if level > 0]
    below = [-threshold for threshold in reversed(stair.thresholds)]
    both = ((*mirrored, *stair.levels), (*below, *middle, *stair.thresholds))
    return Stair(*both, stair.quantum, stair.axis)
