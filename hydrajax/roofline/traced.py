"""Count the operators of a program, their operations and their traffic, in its jaxpr.

Functions are traced on abstract arrays: nothing is computed and a 7B model takes no memory. Counted are:

- **products** (`dot_general`): 2 operations per term of every sum; traffic is both inputs and the output, once. This is
  the count of medusa appendix G, table 5 (its O() drops the 2 and the bytes of a number).
- **rankings**: an argmax or top-k reads the output of the product before it.
- **operations between products** (norms, softmax, SiLU, rotations): XLA fuses them, so they are traffic only; they read
  the output of the product before them and write the input of the product after them. A table lookup is a copy.

Not counted: dead code, and operations without products, such as writes to a cache.
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
        kind: ``weights`` is a product with a parameter, ``attention`` a product of two activations, ``elementwise``
            everything else, counted as traffic only.
    """

    name: str
    flops: float
    bytes: float
    rows: int
    kind: Literal["weights", "attention", "elementwise"]
    count: int = 1

    @property
    def intensity(self) -> float:
        """Operations per byte; "operational intensity" in the paper."""
        return self.flops / self.bytes


def elementwise(name: str, moved: float) -> Operator:
    """Return an operator that moves ``moved`` bytes and whose arithmetic is hidden by that."""
    return Operator(name, 0.0, moved, 1, "elementwise")


def ranking(name: str, rows: int, vocab_size: int) -> Operator:
    """Return an argmax or top-k, which reads the float32 logits once."""
    return elementwise(name, 4 * rows * vocab_size)


def trace(function: Callable, params: Any, *arguments: Any) -> tuple[list[Operator], Any]:
    """Count the operators of ``function(params, *arguments)``.

    Args:
        function: any traceable function.
        params: pytree of (abstract) arrays: the weights. Their paths name the products.
        arguments: other pytrees of (abstract) arrays, such as caches.

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
    count = _Count()
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

    @classmethod
    def of_input(cls, variable, weight: str | None) -> _Value:
        return cls(weight, variable.aval.dtype.itemsize, is_real=bool(weight) or _is_real(variable))


@dataclass
class _Product:
    """A product whose readers are still unknown. made: bytes of computed inputs. output: bytes of the output."""

    operator: Operator
    weight: str | None
    made: int
    output: int
    times: int
    is_ranked: bool = False


@dataclass
class _Count:
    """The operators counted so far."""

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
            self.lookups.append(replace(elementwise(_shown(read[0].weight), 2 * _bytes(eqn.outvars[0])), count=times))
            return [_Value(number=next(self.numbers), is_real=True)]
        products = frozenset().union(*(value.products for value in read))
        if name in _RANKINGS:
            for product in read[0].products:
                self.products[product].is_ranked = True
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
        sizes = [
            atom.aval.size * (value.itemsize or atom.aval.dtype.itemsize)
            for atom, value in zip(eqn.invars, read, strict=True)
        ]
        made = 0
        for value, size in zip(read, sizes, strict=True):
            if not value.itemsize and value.number not in self.made:
                self.made.add(value.number)
                made += size
        weight = next((value.weight for value in read if value.weight), None)
        if weight:
            kind, name = "weights", _shown(weight)
            rows = rows if read[1].weight else out.size // rows
        else:
            softmax = any(self.products[i].operator.kind == "attention" for value in read for i in value.products)
            kind, name = "attention", "weighted sum" if softmax else "scores"
        operator = Operator(name, 2.0 * out.size * terms, sum(sizes) + _bytes(eqn.outvars[0]), rows, kind)
        last = self.products[-1] if self.products else None
        if weight and last and (last.weight, last.operator.rows, last.times) == (weight, rows, times):
            # The same weight as in the product before (shared blocks): it is still in the device's cache.
            last.operator = replace(last.operator, flops=last.operator.flops + operator.flops)
        else:
            self.products.append(_Product(operator, weight, made, _bytes(eqn.outvars[0]), times))
        made_by = frozenset({len(self.products) - 1})
        return _Value(number=next(self.numbers), is_real=True, products=made_by, is_product=True)

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
