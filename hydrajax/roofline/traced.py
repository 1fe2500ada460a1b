"""Count the operators of a program, their operations and their traffic, in its jaxpr.

Functions are traced on abstract arrays: nothing is computed and a 7B model takes no memory. Counted are:

- **products** (`dot_general`): 2 operations per term of every sum; traffic is both inputs and the output, once. This is
  the count of medusa appendix G, table 5 (its O() drops the 2 and the bytes of a number).
- **rankings**: an argmax or top-k reads the output of the product before it.
- **operations between products** (norms, softmax, SiLU, rotations): XLA fuses them, so they are traffic only; they read
  the output of the product before them and write the input of the product after them. A table lookup is a copy.

Not counted: dead code, operations without products, such as writes to a cache, and exchanges for log-probabilities of
a divided vocabulary.

On a mesh the counts are those of one device, with weights divided as `hydrajax.sharding` divides them:

- a product whose outputs are divided reads its whole input; one whose inputs are divided ends in an **all-reduce**;
- attention is divided if its queries are, that is by key-value heads;
- a divided output that a product needs whole is joined by an **all-gather**; so are the best tokens of divided logits;
- a lookup in a divided table ends in an all-reduce; a copied weight is multiplied on every device.
"""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr
from jax.extend.core import Literal as Constant

from hydrajax.models.platforms import Platform, traced_for
from hydrajax.roofline.division import ONE_DEVICE, Division

# Custom kernels hide their products from a jaxpr, so programs are traced for a platform without them.
PLAIN = Platform("none", 1)

# Views of their first operand in another shape or type; a weight stays a weight.
_VIEWS = {"reshape", "transpose", "convert_element_type", "squeeze", "slice", "broadcast_in_dim", "copy", "expand_dims"}
_RANKINGS = {"argmax", "top_k", "reduce_max"}


@dataclass(frozen=True)
class Operator:
    """One operator, or ``count`` equal ones.

    Attributes:
        flops, bytes: Floating-point operations and memory traffic of one operator.
        rows: Of the left matrix, per KV head in attention; the device's rate depends on it.
        kind: ``weights`` is a product with a parameter, ``attention`` a product of two activations, ``collective`` an
            exchange between devices, whose bytes are those that a device sends, ``elementwise`` everything else,
            counted as traffic only.
    """

    name: str
    flops: float
    bytes: float
    rows: int
    kind: Literal["weights", "attention", "elementwise", "collective"]
    count: int = 1

    @property
    def intensity(self) -> float:
        """Operations per byte; "operational intensity" in the paper."""
        return self.flops / self.bytes


def elementwise(name: str, moved: float) -> Operator:
    """Return an operator that moves ``moved`` bytes and whose arithmetic is hidden by that."""
    return Operator(name, 0.0, moved, 1, "elementwise")


def collective(name: str, sent: float) -> Operator:
    """Return an exchange between devices in which each sends ``sent`` bytes."""
    return Operator(name, 0.0, sent, 1, "collective")


def ranking(name: str, rows: int, vocab_size: float) -> Operator:
    """Return an argmax or top-k, which reads the float32 logits once."""
    return elementwise(name, 4 * rows * vocab_size)


def joined_ranking(name: str, best: int, division: Division) -> Operator:
    """Return the exchange of ``best`` logits and ids of each device, which rank their parts of a vocabulary."""
    return collective(f"all-gather {name}", division.all_gather(8 * best * division.model))


def trace(
    function: Callable, params: Any, *arguments: Any, boxed: Any = None, division: Division = ONE_DEVICE
) -> tuple[list[Operator], Any]:
    """Count the operators of ``function(params, *arguments)``.

    Args:
        function: any traceable function.
        params: pytree of (abstract) arrays: the weights. Their paths name the products.
        arguments: other pytrees of (abstract) arrays, such as caches.
        boxed: ``params`` boxed with their logical axes; arrays without axes are copied to every device.
        division: the mesh; counts are those of one of its devices.

    Returns:
        Distinct operators with counts, in program order, and the shapes of the function's result.

    Raises:
        ValueError: a product is in a loop of unknown length.
    """
    with traced_for(PLAIN):
        closed, shapes = jax.make_jaxpr(function, return_shape=True)(params, *arguments)
    paths = [path for path, _ in jax.tree.leaves_with_path(params)]
    names = [jax.tree_util.keystr(path, simple=True, separator=" ") for path in paths]
    names += [None] * (len(closed.jaxpr.invars) - len(names))
    inputs = [_Value.of_input(variable, name) for variable, name in zip(closed.jaxpr.invars, names, strict=True)]
    if division.model > 1:
        leaves = zip(inputs, jax.tree.leaves(params), division.axes(params if boxed is None else boxed), strict=False)
        inputs[: len(paths)] = [one._replace(shape=x.shape, axis=axis) for one, x, axis in leaves]
    count = _Count(division)
    outputs = count.walk(closed.jaxpr, inputs, 1)
    returned = {product for value in outputs for product in value.products if value.is_product}
    return merged(count.operators(returned)), shapes


def merged(operators: Iterable[Operator]) -> list[Operator]:
    """Return every distinct operator once, with the sum of the counts."""
    counts: Counter[Operator] = Counter()
    for operator in operators:
        counts[replace(operator, count=1)] += operator.count
    return [replace(operator, count=count) for operator, count in counts.items()]


def at_depth(layers: int, operators_at: Callable[[int], Iterable[Operator]]) -> list[Operator]:
    """Extrapolate the operators of ``layers`` equal layers from one and two layers, which are fast to trace."""
    one, two = ({replace(op, count=1): op.count for op in operators_at(n)} for n in (1, 2))
    counts = {op: one.get(op, 0) + (layers - 1) * (count - one.get(op, 0)) for op, count in two.items()}
    return [replace(op, count=count) for op, count in counts.items() if count]


def flops(operators: Iterable[Operator]) -> float:
    return sum(operator.count * operator.flops for operator in operators)


def _shown(weight: str) -> str:
    """Format a path: ``layers_3 gate_up``, as in every layer, is "gate up", ``head_2 lm_kernel`` "head 2 lm kernel"."""
    return re.sub(r"^(\d+ )?(layers_\d+ )?", "", weight).replace("_", " ")


class _Value(NamedTuple):
    """Properties of a variable.

    Attributes:
        weight: Path of the parameter that it is a view of.
        shape, axis: Of that parameter, and its axis that devices divide.
        itemsize: Bytes per number of the input that it is a view of, 0 for computed values.
        number: Of the computation that made it.
        is_real: Computed from floating-point inputs without integers in between, unlike masks.
        products: The products that it directly depends on.
        is_product: It is a view of a product's output.
    """

    weight: str | None = None
    itemsize: int = 0
    number: int = 0
    is_real: bool = False
    products: frozenset[int] = frozenset()
    is_product: bool = False
    shape: tuple[int, ...] = ()
    axis: int | None = None

    @classmethod
    def of_input(cls, variable, weight: str | None) -> _Value:
        return cls(weight, variable.aval.dtype.itemsize, is_real=bool(weight) or _is_real(variable))


@dataclass
class _Product:
    """A product whose readers are still unknown.

    Attributes:
        made: Bytes of computed inputs.
        output: Bytes of the output.
        is_divided, is_joined: Each device has a part of the output; the parts are also gathered.
        exchanges: Collectives on its output.
        best: Numbers that a ranking of the output returns.
    """

    operator: Operator
    weight: str | None
    made: float
    output: float
    times: int
    is_ranked: bool = False
    is_divided: bool = False
    is_joined: bool = False
    exchanges: list[Operator] = field(default_factory=list)
    best: int = 0


class _ProductDivision(NamedTuple):
    """How devices divide a product: by its inputs, over which they sum, by its outputs, or not at all.

    Attributes:
        inputs, outputs: They are divided. Attention, by heads, divides both.
    """

    inputs: bool = False
    outputs: bool = False

    @property
    def anything(self) -> bool:
        return self.inputs or self.outputs

    @classmethod
    def of(cls, weight: _Value | None, terms: int, reads_divided: bool) -> _ProductDivision:
        """Return the division of a product of this weight over ``terms`` terms, or of two activations."""
        if weight is None:
            return cls(reads_divided, reads_divided)
        if weight.axis is None:
            return cls()
        # A kernel is [inputs, *outputs]. An embedding that is the lm head is multiplied the other way round.
        inputs = (weight.axis == 0) == (terms == weight.shape[0])
        return cls(inputs, not inputs)


@dataclass
class _Count:
    """The operators counted so far."""

    division: Division = ONE_DEVICE
    products: list[_Product] = field(default_factory=list)
    lookups: list[Operator] = field(default_factory=list)
    made: set[int] = field(default_factory=set)  # numbers of the values that are counted as made
    numbers: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    def walk(self, jaxpr: Jaxpr, inputs: list[_Value], times: int) -> list[_Value]:
        """Count a jaxpr that runs ``times`` times, and return the properties of its outputs."""
        known = dict(zip(jaxpr.invars, inputs, strict=True))

        def value_of(atom) -> _Value:
            return _Value() if isinstance(atom, Constant) else known.get(atom, _Value())

        for eqn in _alive(jaxpr):
            read = [value_of(atom) for atom in eqn.invars]
            known.update(zip(eqn.outvars, self._equation(eqn, read, times), strict=True))
        return [value_of(atom) for atom in jaxpr.outvars]

    def _equation(self, eqn, read: list[_Value], times: int) -> list[_Value]:
        name, params = eqn.primitive.name, eqn.params
        if name == "dot_general":
            return [self._product(eqn, read, times)]
        if name == "scan":
            return self.walk(params["jaxpr"].jaxpr, read, times * params["length"])
        if name == "while":
            before, n_consts = len(self.products), params["cond_nconsts"]
            outputs = self.walk(params["body_jaxpr"].jaxpr, read[n_consts:], times)
            if len(self.products) > before:
                raise ValueError("a product in a loop of unknown length cannot be counted")
            return outputs
        if name == "cond":
            return self._largest_branch(params["branches"], read[1:], times)
        inner = [x for x in params.values() if isinstance(x, (Jaxpr, ClosedJaxpr))]
        jaxpr = getattr(inner[0], "jaxpr", inner[0]) if inner else None
        if jaxpr and len(jaxpr.invars) == len(read):  # a call; a scatter's jaxpr has other inputs
            return self.walk(jaxpr, read, times)
        if name == "gather" and read[0].weight:
            table, rows = _shown(read[0].weight), _bytes(eqn.outvars[0])
            self.lookups.append(replace(elementwise(table, 2 * rows), count=times))
            if read[0].axis is not None:
                summed = collective(f"all-reduce {table}", self.division.all_reduce(rows))
                self.lookups.append(replace(summed, count=times))
            return [_Value(number=next(self.numbers), is_real=True)]
        products = frozenset().union(*(value.products for value in read))
        if name in _RANKINGS:
            for product in read[0].products:
                self.products[product].is_ranked = True
                if name != "reduce_max":
                    self.products[product].best = eqn.outvars[0].aval.size
        if name in _VIEWS and (read[0].weight or _is_real(eqn.outvars[0])):
            return [read[0]._replace(products=products)]
        is_real = any(value.is_real for value in read)
        return [
            _Value(number=next(self.numbers), is_real=is_real, products=products) if _is_real(variable) else _Value()
            for variable in eqn.outvars
        ]

    def _largest_branch(self, branches, read: list[_Value], times: int) -> list[_Value]:
        """Count the branch with the most operations."""
        begun, found = len(self.products), []
        for branch in branches:
            outputs = self.walk(branch.jaxpr, read, times)
            products, self.products[begun:] = self.products[begun:], []
            found.append((flops(product.operator for product in products), products, outputs))
        _, products, outputs = max(found, key=lambda each: each[0])
        self.products += products
        return outputs

    def _product(self, eqn, read: list[_Value], times: int) -> _Value:
        if not any(value.is_real for value in read):  # such as a product of masks
            return _Value()
        (contracted, _), (batch, _) = eqn.params["dimension_numbers"]
        left, out = eqn.invars[0].aval, eqn.outvars[0].aval
        terms = math.prod(left.shape[i] for i in contracted)
        rows = left.size // terms // math.prod(left.shape[i] for i in batch)
        sizes: list[float] = [
            atom.aval.size * (value.itemsize or atom.aval.dtype.itemsize)
            for atom, value in zip(eqn.invars, read, strict=True)
        ]
        output: float = _bytes(eqn.outvars[0])
        operations = 2.0 * out.size * terms
        weight = next((value for value in read if value.weight), None)
        division = _ProductDivision.of(weight, terms, self._has_divided(read))
        exchanges: list[Operator] = []
        if division.anything:
            devices = self.division.model
            operations /= devices
            divided = [value is weight or division.inputs for value in read]
            sizes = [size / devices if part else size for size, part in zip(sizes, divided, strict=True)]
            if division.outputs:
                output /= devices
            else:
                exchanges.append(collective(f"all-reduce {_shown(weight.weight)}", self.division.all_reduce(output)))
        if not division.inputs:
            self._join(read)
        made = 0.0
        for value, size in zip(read, sizes, strict=True):
            if not value.itemsize and value.number not in self.made:
                self.made.add(value.number)
                made += size
        if weight:
            kind, name = "weights", _shown(weight.weight)
            rows = rows if read[1].weight else out.size // rows
        else:
            softmax = any(self.products[i].operator.kind == "attention" for value in read for i in value.products)
            kind, name = "attention", "weighted sum" if softmax else "scores"
        path = weight and weight.weight
        operator = Operator(name, operations, sum(sizes) + output, rows, kind)
        last = self.products[-1] if self.products else None
        if path and last and (last.weight, last.operator.rows, last.times) == (path, rows, times):
            # The same weight as in the product before (shared blocks): it is still in the device's cache.
            last.operator = replace(last.operator, flops=last.operator.flops + operator.flops)
            last.exchanges, last.is_joined = last.exchanges + exchanges, False  # its new output is not gathered yet
        else:
            product = _Product(operator, path, made, output, times, is_divided=division.outputs, exchanges=exchanges)
            self.products.append(product)
        made_by = frozenset({len(self.products) - 1})
        return _Value(number=next(self.numbers), is_real=True, products=made_by, is_product=True)

    def _has_divided(self, read: list[_Value]) -> bool:
        """Return whether a value comes from a product of which each device has a part."""
        return any(self.products[i].is_divided for value in read for i in value.products)

    def _join(self, read: list[_Value]) -> None:
        """Gather divided outputs, each once, for a product that needs its input whole."""
        for product in (self.products[i] for value in read for i in sorted(value.products)):
            if product.is_divided and not product.is_joined:
                product.is_joined = True
                whole = product.output * self.division.model
                product.exchanges.append(
                    collective(f"all-gather {product.operator.name}", self.division.all_gather(whole))
                )

    def operators(self, outputs: set[int]) -> list[Operator]:
        """Return all operators. ``outputs`` are products that the traced function returns, to be read elsewhere."""
        found = list(self.lookups)
        for number, product in enumerate(self.products):
            name, read = product.operator.name, 0 if number in outputs else product.output
            found.append(replace(product.operator, count=product.times))
            if product.is_ranked and product.operator.kind == "weights":
                found.append(replace(elementwise(f"{name} ranking", read), count=product.times))
                read = 0
            if moved := product.made + read:
                found.append(replace(elementwise(f"around {name}", moved), count=product.times))
            exchanges = list(product.exchanges)
            if product.best and product.is_divided:
                exchanges.append(joined_ranking(f"{name} ranking", product.best, self.division))
            found += [replace(exchange, count=product.times) for exchange in exchanges]
        return found


def _alive(jaxpr: Jaxpr) -> list:
    """Return the equations whose results are used."""
    used, alive = set(jaxpr.outvars) - {None}, []
    for eqn in reversed(jaxpr.eqns):
        if eqn.effects or any(variable in used for variable in eqn.outvars):
            alive.append(eqn)
            used |= {atom for atom in eqn.invars if not isinstance(atom, Constant)}
    return alive[::-1]


def _is_real(variable) -> bool:
    return jax.numpy.issubdtype(variable.aval.dtype, jax.numpy.floating)


def _bytes(variable) -> int:
    return variable.aval.size * variable.aval.dtype.itemsize
