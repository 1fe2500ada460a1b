"""Count the operators of a program, their operations and their traffic, in its jaxpr.

Functions are traced on abstract arrays: nothing is computed and a 7B model takes no memory. Counted are:

- **products** (`dot_general`): 2 operations per term of every sum; traffic is both inputs and the output, once. This is
  the count of medusa appendix G, table 5 (its O() drops the 2 and the bytes of a number).
- **rankings**: an argmax or top-k reads the output of the product before it.
- **experts** (`hydrajax.models.experts`): a loop over blocks of tokens of one expert each. Each token is
  multiplied with its own experts; those that `woken` expects are traffic.
- **operations between products** (norms, softmax, SiLU, rotations): XLA fuses them, so they are traffic only; they read
  the output of the product before them and write the input of the product after them. A table lookup is a copy.

Not counted: dead code, operations without products, such as writes to a cache, and exchanges for log-probabilities of
a sharded vocabulary.

On a mesh the counts are those of one device, with weights sharded as `hydrajax.sharding` shards them:

- a matmul whose outputs are sharded reads its whole input; one whose inputs are sharded ends in an **all-reduce**;
- attention is sharded if its queries are, that is by key-value heads;
- a sharded output that a matmul needs replicated ends in an **all-gather**; so do the best tokens of sharded logits;
- a lookup in a sharded table ends in an all-reduce; a replicated weight is multiplied on every device.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import jax
from jax.extend.core import Jaxpr, jaxprs_in_params
from jax.extend.core import Literal as Constant

from hydrajax.bench.device_memory import woken
from hydrajax.bench.roofline.division import ONE_DEVICE, Division
from hydrajax.bench.roofline.operators import Operator, collective, elementwise, flops, joined_ranking, merged
from hydrajax.models.weights import Quantized
from hydrajax.ops.trace import Platform, tracing

# Custom kernels hide their products from a jaxpr, so programs are traced for a platform without them.
PLAIN = Platform("none", 1)

# Views of their first operand in another shape or type; a weight stays a weight.
_VIEWS = {"reshape", "transpose", "convert_element_type", "squeeze", "slice", "broadcast_in_dim", "copy", "expand_dims"}
_RANKINGS = {"argmax", "top_k", "reduce_max"}


def trace(
    function: Callable, params: Any, *arguments: Any, boxed: Any = None, division: Division = ONE_DEVICE
) -> tuple[list[Operator], Any]:
    """Count the operators of ``function(params, *arguments)``.

    Args:
        params: pytree of (abstract) arrays: the weights. Their paths name the products.
        arguments: other pytrees of (abstract) arrays, such as caches.
        boxed: ``params`` boxed with their logical axes; arrays without axes are copied to every device.
        division: the mesh; counts are those of one of its devices.

    Returns:
        Distinct operators with counts, in program order, and the shapes of the function's result.

    Raises:
        ValueError: a product is in a loop of unknown length.
    """
    with tracing(platform=PLAIN):
        closed, shapes = jax.make_jaxpr(function, return_shape=True)(params, *arguments)
    names: list[str | None] = []
    for path, leaf in jax.tree.leaves_with_path(params, is_leaf=lambda x: isinstance(x, Quantized)):
        name = jax.tree_util.keystr(path, simple=True, separator=" ")
        others = list(leaf.arrays())[1:] if isinstance(leaf, Quantized) else []
        names += [name, *(f"{name} {other}" for other in others)]
    weights = len(names)
    names += [None] * (len(closed.jaxpr.invars) - len(names))
    inputs = [
        _Value(name, variable.aval.dtype.itemsize, is_real=bool(name) or _is_real(variable))
        for variable, name in zip(closed.jaxpr.invars, names, strict=True)
    ]
    if division.model > 1:
        leaves = zip(inputs, jax.tree.leaves(params), division.axes(params if boxed is None else boxed), strict=False)
        inputs[:weights] = [one._replace(shape=x.shape, axis=axis) for one, x, axis in leaves]
    count = _Count(division)
    outputs = count.walk(closed.jaxpr, inputs, 1)
    returned = {product for value in outputs for product in value.products if value.is_product}
    return merged(count.operators(returned)), shapes


def _shown(weight: str) -> str:
    """Format a path: ``layers_3 gate_up``, as in every layer, is "gate up", ``head_2 lm_kernel`` "head 2 lm kernel"."""
    return re.sub(r"^(\d+ )?(layers_\d+ )?", "", weight).replace("_", " ")


class _Value(NamedTuple):
    """Properties of a variable.

    Attributes:
        weight: Path of the parameter that it is a view of.
        shape, axis: Of that parameter, and its axis that is sharded.
        itemsize: Bytes per number of the input that it is a view of, 0 for computed values.
        number: Of the computation that made it.
        is_real: Computed from floating-point inputs without integers in between, unlike masks.
        products: The products that it directly depends on.
        is_product: It is a view of a product's output.
        experts: Of so many experts it is the one that a block of tokens chose; 0 for other values.
    """

    weight: str | None = None
    itemsize: int = 0
    number: int = 0
    is_real: bool = False
    products: frozenset[int] = frozenset()
    is_product: bool = False
    shape: tuple[int, ...] = ()
    axis: int | None = None
    experts: int = 0


@dataclass
class _Product:
    """A product whose readers are still unknown.

    Attributes:
        made: Bytes of computed inputs.
        is_divided, is_joined: Each device has a part of the output; the parts are also gathered.
        exchanges: Collectives on its output.
        best: Numbers that a ranking of the output returns.
        stored: Bytes of the weight.
        experts: Of so many experts the weight is one; 0 for other weights.
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
    stored: float = 0.0
    experts: int = 0


def _sharded(weight: _Value | None, terms: int, reads_divided: bool) -> tuple[bool, bool]:
    """Return whether a product's inputs are sharded, over which devices sum, and its outputs.

    The product is one of this weight over ``terms`` terms, or attention, which shards both by heads.
    """
    if weight is None or weight.axis is None:
        return (reads_divided, reads_divided) if weight is None else (False, False)
    if weight.experts:  # each device has some of them, and multiplies their tokens
        return True, True
    # A kernel is [inputs, *outputs]. An embedding that is the lm head is multiplied the other way round.
    inputs = (weight.axis == 0) == (terms == weight.shape[0])
    return inputs, not inputs


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
            return self._loop_of_unknown_length(eqn, read, times)
        if name == "dynamic_slice" and read[0].weight and _is_one_of_many(eqn):
            return [read[0]._replace(experts=eqn.invars[0].aval.shape[0])]
        if name == "cond":
            return self._largest_branch(params["branches"], read[1:], times)
        jaxpr = next(iter(jaxprs_in_params(params)), None)
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

    def _loop_of_unknown_length(self, eqn, read: list[_Value], times: int) -> list[_Value]:
        """Count a loop without products, or over blocks of tokens of one expert each."""
        begun, n_consts = len(self.products), eqn.params["cond_nconsts"]
        outputs = self.walk(eqn.params["body_jaxpr"].jaxpr, read[n_consts:], times)
        products = self.products[begun:]
        if not all(product.experts for product in products):
            raise ValueError("a product in a loop of unknown length cannot be counted")
        if products:
            tokens = next(v for v, value in zip(eqn.invars, read, strict=True) if value.is_real and not value.weight)
            self._count_experts(products, tokens.aval.shape[0], eqn.outvars[-1].aval)
        return outputs

    def _count_experts(self, products: list[_Product], tokens: int, sums: Any) -> None:
        """Count all blocks in place of one; ``sums`` are those of every pair of a token and an expert."""
        pairs = sums.shape[0]
        for product in products:
            one, awake = product.operator, woken(product.experts, pairs / tokens, tokens)
            share = pairs / one.rows  # of the block's rows
            product.operator = replace(
                one,
                flops=one.flops * share,
                bytes=(one.bytes - product.stored) * share + product.stored * awake,
                rows=max(1, round(pairs / awake)),
            )
            product.made, product.output = product.made * share, product.output * share
        if products[-1].is_divided:
            size = 4 * sums.size / pairs * tokens  # float32
            products[-1].exchanges.append(collective("all-reduce experts", self.division.all_reduce(size)))
        for product in products:
            product.is_divided = False

    def _largest_branch(self, branches, read: list[_Value], times: int) -> list[_Value]:
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
        reads_divided = any(self.products[i].is_divided for value in read for i in value.products)
        inputs_sharded, outputs_sharded = _sharded(weight, terms, reads_divided)
        exchanges: list[Operator] = []
        if inputs_sharded or outputs_sharded:
            devices = self.division.model
            operations /= devices
            divided = [value is weight or inputs_sharded for value in read]
            sizes = [size / devices if part else size for size, part in zip(sizes, divided, strict=True)]
            if outputs_sharded:
                output /= devices
            else:
                exchanges.append(collective(f"all-reduce {_shown(weight.weight)}", self.division.all_reduce(output)))
        if not inputs_sharded:
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
        stored = next((size for value, size in zip(read, sizes, strict=True) if value is weight), 0.0)
        last = self.products[-1] if self.products else None
        if path and last and (last.weight, last.operator.rows, last.times) == (path, rows, times):
            # The same weight as in the product before (shared blocks): it is still in the device's cache.
            last.operator = replace(last.operator, flops=last.operator.flops + operator.flops)
            last.exchanges, last.is_joined = last.exchanges + exchanges, False  # its new output is not gathered yet
        else:
            product = _Product(operator, path, made, output, times, is_divided=outputs_sharded, exchanges=exchanges)
            product.stored, product.experts = stored, weight.experts if weight else 0
            self.products.append(product)
        made_by = frozenset({len(self.products) - 1})
        return _Value(number=next(self.numbers), is_real=True, products=made_by, is_product=True)

    def _join(self, read: list[_Value]) -> None:
        """Gather sharded outputs, each once, for a matmul that needs its input replicated."""
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
    used, alive = set(jaxpr.outvars) - {None}, []
    for eqn in reversed(jaxpr.eqns):
        if eqn.effects or any(variable in used for variable in eqn.outvars):
            alive.append(eqn)
            used |= {atom for atom in eqn.invars if not isinstance(atom, Constant)}
    return alive[::-1]


def _is_one_of_many(eqn) -> bool:
    """Return whether a slice is one whole entry along the first axis, a matrix or more."""
    shape, sizes = eqn.invars[0].aval.shape, eqn.params["slice_sizes"]
    return len(shape) > 2 and sizes[0] == 1 and sizes[1:] == shape[1:]


def _is_real(variable) -> bool:
    return jax.numpy.issubdtype(variable.aval.dtype, jax.numpy.floating)


def _bytes(variable) -> int:
    return variable.aval.size * variable.aval.dtype.itemsize
