"""What memkit knows of each optimizer, a row each: values of Trainer's `optim`, and classes that are given to it.

Techniques, rules, predictions, advice and rehearsals take from these rows what they need. docs/contributing.md shows
how to add one. Standard library only.

Bytes of states are arithmetic over the shapes of what is trained; tests compare every formula with the tensors that
the real optimizer holds after a step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from typing import Final, Literal

SMALLEST_QUANTISED: Final = 4096
"""Elements below which no state is quantised (bitsandbytes 0.50.2: optim/optimizer.py 508; torchao 0.18.0:
optim/adam.py 78)."""

_DISTRIBUTIONS: Final = {"optimi": "torch-optimi"}
"""Import name → pip's name, where more than `_` and `-` differs."""

_BNB_BLOCK: Final = 256
"""bitsandbytes 0.50.2: optim/optimizer.py 528."""

TORCHAO_BLOCKS: Final = {8: 256, 4: 128}
"""Bits → elements that share a scale by default (torchao 0.18.0: optim/adam.py, `block_size`)."""

_TABLE_ENTRIES: Final = {8: 256, 4: 16}
"""Bits → entries of torchao's table of a state (torchao 0.18.0: optim/quant_utils.py)."""

_WORD: Final = 4  # bytes of fp32


@dataclass(frozen=True, slots=True)
class Shapes:
    """What is trained, each parameter once.

    Attributes:
        matrices: (rows, columns) of the weights of linear layers, as they are stored.
        embeddings: (rows, columns) of embeddings, with an output layer that is tied to one.
        vectors: elements of all the rest.
        projected: how many of the first `matrices` GaLore and APOLLO project; None: all of them.
    """

    matrices: tuple[tuple[int, int], ...]
    embeddings: tuple[tuple[int, int], ...] = ()
    vectors: tuple[int, ...] = ()
    projected: int | None = None

    @property
    def sizes(self) -> tuple[int, ...]:
        """Elements of every parameter."""
        return (*(rows * columns for rows, columns in (*self.matrices, *self.embeddings)), *self.vectors)


@dataclass(frozen=True, slots=True)
class States:
    """Bytes of an optimizer's states: `quantised` with their scales and tables, and what is `plain` numbers."""

    quantised: int
    plain: int

    @property
    def total(self) -> int:
        return self.quantised + self.plain


@dataclass(frozen=True, slots=True)
class Options:
    """What a formula may depend on besides the shapes.

    Attributes:
        weight_bytes: of one number of a parameter; torch's own optimizers keep their states in that dtype.
        rank: of GaLore's and APOLLO's projections.
        momentum: whether SGD has one.
    """

    weight_bytes: int = 4
    rank: int = 128
    momentum: bool = True


@dataclass(frozen=True, slots=True)
class Formula:
    """Bytes of states.

    Attributes:
        bytes_of: what is trained, with these options.
        source: the same in words; `{weight_bytes}` stands for the bytes of one number of a parameter.
    """

    bytes_of: Callable[[Shapes, Options], States]
    source: str

    @property
    def bytes_a_parameter(self) -> float:
        """Of one fp32 matrix of 4096 × 4096."""
        return self.bytes_of(Shapes(((4096, 4096),)), Options()).total / 4096**2


def _moments(count: Literal[1, 2], *, fp32: bool = False) -> Formula:
    """`count` numbers a parameter, in the weights' dtype or always in fp32."""

    def states(shapes: Shapes, options: Options) -> States:
        return States(0, count * (_WORD if fp32 else options.weight_bytes) * sum(shapes.sizes))

    number = "4" if fp32 else "{weight_bytes}"
    one = count == 1
    source = f"one moment: {number} bytes a parameter" if one else f"two moments: {number} bytes each a parameter"
    return Formula(states, source)


def _bitsandbytes(moments: int) -> Formula:
    """Embeddings keep 32 bits: Trainer overrides them (transformers 5.23.0: trainer.py 1331-1344)."""

    def states(shapes: Shapes, options: Options) -> States:
        candidates = (*(rows * columns for rows, columns in shapes.matrices), *shapes.vectors)
        eight = [size for size in candidates if size >= SMALLEST_QUANTISED]
        rest = sum(shapes.sizes) - sum(eight)
        return States(moments * sum(size + _WORD * -(-size // _BNB_BLOCK) for size in eight), moments * _WORD * rest)

    each = "1 + 4/256" if moments == 1 else f"{moments} × (1 + 4/256)"
    wide = f"{moments * _WORD} for embeddings and below {SMALLEST_QUANTISED} elements"
    return Formula(states, f"{each} bytes a parameter, {wide} (bitsandbytes)")


def _torchao(bits: Literal[4, 8], block: int, *, wide_rest: bool) -> Formula:
    """Both moments in `bits` each, in blocks of elements that share a scale; each has a table of its own (torchao
    0.18.0: optim/subclass_8bit.py, `zeros`). `wide_rest`: what is not quantised is kept in fp32."""

    def states(shapes: Shapes, options: Options) -> States:
        sizes = shapes.sizes
        low = [size for size in sizes if size >= SMALLEST_QUANTISED and size % block == 0]
        each = sum(size * bits // 8 + _WORD * (size // block) + _WORD * _TABLE_ENTRIES[bits] for size in low)
        rest = _WORD if wide_rest else options.weight_bytes
        return States(2 * each, 2 * rest * (sum(sizes) - sum(low)))

    number = "1" if bits == 8 else "1/2"
    more = f"more below {SMALLEST_QUANTISED} elements or not divisible by {block}"
    source = f"2 × ({number} + 4/{block}) bytes a parameter (torchao); {more}"
    return Formula(states, source)


def _low_rank_states(shapes: Shapes, options: Options) -> States:
    """Projected: two moments of (longer side) × rank, and a projector of rank × (shorter side); the rest as AdamW."""
    chosen = shapes.matrices if shapes.projected is None else shapes.matrices[: shapes.projected]
    projected = 0
    for rows, columns in chosen:
        short, long = sorted((rows, columns))
        projected += 2 * long * min(options.rank, short) + short * min(options.rank, short)
    rest = sum(shapes.sizes) - sum(rows * columns for rows, columns in chosen)
    return States(0, options.weight_bytes * (projected + 2 * rest))


def _factored_states(shapes: Shapes, options: Options) -> States:
    factored = sum(rows + columns for rows, columns in (*shapes.matrices, *shapes.embeddings))
    return States(0, _WORD * (factored + sum(shapes.vectors)))


def _momentum_states(shapes: Shapes, options: Options) -> States:
    return States(0, options.weight_bytes * sum(shapes.sizes) if options.momentum else 0)


_ADAMW: Final = _moments(2)
_SGD: Final = Formula(_momentum_states, "one moment: {weight_bytes} bytes a parameter")
_FACTORED: Final = Formula(
    _factored_states, "4 bytes × (rows + columns) a matrix (Shazeer & Stern 2018, arXiv 1804.04235)"
)
_NONE: Final = Formula(lambda shapes, options: States(0, 0), "none")
_LOW_RANK: Final = Formula(
    _low_rank_states,
    "{weight_bytes} bytes × (2 × longer side + shorter side) × rank a projected matrix; two moments of the rest",
)

Rounding = Literal["nearest", "stochastic", "compensated", "tried"]
"""What becomes of an update that is smaller than 16-bit weights can tell. `nearest`: it is lost. `stochastic`: it is
kept on average. `compensated`: a second tensor keeps it (Kahan summation). `tried`: it is lost too, but the
optimizer's authors train 16-bit weights with it, and say how well."""


@dataclass(frozen=True, slots=True)
class Optimizer:
    """One optimizer.

    Attributes:
        name: a value of `optim`; or a pattern of `module:Class`, upper or lower case, as `fnmatch` reads it.
        algorithm: what steps. Two rows of one algorithm compute the same but for rounding.
        technique: the technique that chooses it; empty if there is none.
        packages: import names of what it needs beyond the core dependencies; `install_command` brings them.
        states: bytes of its states; AdamW's where no other formula is known.
        bits: of a state.
        reads: what Trainer reads of `optim_args` for it; None: it takes whatever it is given.
        takes: which of Trainer's settings for Adam reach it, as constructors name them.
        takes_groups: it is built with Trainer's parameter groups, which carry the weight decay.
        gradients_at_once: gradients that live together, where each is used and dropped in the backward pass; None:
            all of them live until the step.
        low_rank: it projects the gradients of linear layers.
        unpaged: of an optimizer whose states lie in CUDA's managed memory: the same without; empty for all others.
        on_cpu: whether it steps on a CPU.
        rounding: of 16-bit weights.
        rounding_option: the option that switches `rounding` on; empty if nothing has to.
        foreach: it works on lists of all parameters at once, with temporaries as large as they are.
        deepspeed: DeepSpeed's optimizer of the same algorithm and states, as its JSON names it; empty: there is none.
        compiled: its step is compiled.
    """

    name: str
    algorithm: str = ""
    technique: str = ""
    packages: tuple[str, ...] = ()
    states: Formula = _ADAMW
    bits: Literal[4, 8, 32] = 32
    reads: tuple[str, ...] | None = ()
    takes: tuple[str, ...] = ("betas", "eps")
    takes_groups: bool = True
    gradients_at_once: int | None = None
    low_rank: bool = False
    unpaged: str = ""
    on_cpu: bool = True
    rounding: Rounding = "nearest"
    rounding_option: str = ""
    foreach: bool = False
    deepspeed: Literal["", "adamw", "lion", "adagrad"] = ""
    compiled: bool = False


_ADEMAMIX: Final = ("beta1", "beta2", "beta3", "alpha", "eps", "t_alpha", "t_beta3")
_SCHEDULE_FREE: Final = ("weight_lr_power", "r")
_TORCHAO_READS: Final = ("block_size", "bf16_stochastic_round")
_RATE_ONLY: Final = ()
"""Of Adam's settings none reaches it: Trainer hands it the learning rate, and what it reads of `optim_args`."""
_GALORE_READS: Final = ("rank", "update_proj_gap", "scale", "proj_type")

_bnb = partial(Optimizer, packages=("bitsandbytes",))
_galore = partial(
    Optimizer, packages=("galore_torch",), reads=_GALORE_READS, takes=_RATE_ONLY, takes_groups=False, low_rank=True,
    rounding="tried",
)  # fmt: skip
_apollo = partial(
    Optimizer, packages=("apollo_torch",), reads=(*_GALORE_READS, "proj", "scale_type"), takes_groups=False,
    low_rank=True, states=_LOW_RANK, rounding="tried",
)  # fmt: skip
# LOMO uses a gradient when the next one arrives (lomo-optim 0.1.1: lomo.py 96-137).
_lomo = partial(
    Optimizer, packages=("lomo_optim",), takes=_RATE_ONLY, takes_groups=False, gradients_at_once=2, rounding="tried"
)

OPTIMIZERS: Final[dict[str, Optimizer]] = {
    row.name: row
    for row in (
        Optimizer("adamw_torch", "AdamW", "adamw-foreach", foreach=True, deepspeed="adamw"),
        Optimizer("adamw_torch_fused", "AdamW", "adamw-fused", deepspeed="adamw"),
        Optimizer("adamw_torch_xla", "AdamW", deepspeed="adamw"),
        Optimizer("adamw_torch_npu_fused", "AdamW", deepspeed="adamw"),
        Optimizer(
            "adamw_anyprecision", "AdamW", packages=("torchdistx",),
            reads=("use_kahan_summation", "momentum_dtype", "variance_dtype", "compensation_buffer_dtype"),
            rounding="compensated", rounding_option="use_kahan_summation",
        ),
        # Trainer gives both a block of 256 (transformers 5.23.0: trainer_optimizer.py 470), and cannot be told
        # otherwise; it rounds to nearest unless it is asked (472).
        Optimizer(
            "adamw_torch_8bit", "AdamW", packages=("torchao",), states=_torchao(8, 256, wide_rest=False), bits=8,
            reads=_TORCHAO_READS, rounding="stochastic", rounding_option="bf16_stochastic_round",
        ),
        Optimizer(
            "adamw_torch_4bit", "AdamW", packages=("torchao",), states=_torchao(4, 256, wide_rest=False), bits=4,
            reads=_TORCHAO_READS, rounding="stochastic", rounding_option="bf16_stochastic_round",
        ),
        Optimizer(
            "sgd", "SGD", "sgd-momentum", states=_SGD, takes=_RATE_ONLY,
            reads=("momentum", "dampening", "nesterov", "weight_decay"),
        ),
        Optimizer(
            "adagrad", "Adagrad", reads=("lr_decay", "eps", "weight_decay"), takes=_RATE_ONLY, deepspeed="adagrad"
        ),
        Optimizer(
            "rmsprop", "RMSprop", reads=("momentum", "alpha", "eps", "centered", "weight_decay"), takes=_RATE_ONLY
        ),
        Optimizer("adafactor", "Adafactor", "adafactor", states=_FACTORED, takes=_RATE_ONLY),
        _bnb("adamw_bnb_8bit", "AdamW", "adamw-8bit", states=_bitsandbytes(2), bits=8),
        _bnb("adamw_8bit", "AdamW", states=_bitsandbytes(2), bits=8),  # another name of adamw_bnb_8bit
        _bnb(
            "paged_adamw_8bit", "AdamW", "paged-adamw-8bit", states=_bitsandbytes(2), bits=8, unpaged="adamw_bnb_8bit"
        ),
        _bnb("paged_adamw_32bit", "AdamW", unpaged="adamw_torch", deepspeed="adamw"),
        _bnb("lion_8bit", "Lion", "lion-8bit", states=_bitsandbytes(1), bits=8, takes=("betas",)),
        _bnb("lion_32bit", "Lion", takes=("betas",), deepspeed="lion"),
        _bnb("paged_lion_8bit", "Lion", states=_bitsandbytes(1), bits=8, takes=("betas",), unpaged="lion_8bit"),
        _bnb("paged_lion_32bit", "Lion", takes=("betas",), unpaged="lion_32bit", deepspeed="lion"),
        _bnb("ademamix", "AdEMAMix", reads=_ADEMAMIX),
        _bnb("ademamix_8bit", "AdEMAMix", bits=8, reads=_ADEMAMIX),
        _bnb("paged_ademamix_32bit", "AdEMAMix", reads=_ADEMAMIX, unpaged="ademamix"),
        _bnb("paged_ademamix_8bit", "AdEMAMix", bits=8, reads=_ADEMAMIX, unpaged="ademamix_8bit"),
        _bnb("rmsprop_bnb", "RMSprop", reads=None),
        _bnb("rmsprop_bnb_8bit", "RMSprop", bits=8, reads=None),
        _bnb("rmsprop_bnb_32bit", "RMSprop", reads=None),
        _galore("galore_adamw", "GaLore", "galore", states=_LOW_RANK),
        _galore("galore_adamw_layerwise", "GaLore", "galore-layerwise", states=_LOW_RANK, gradients_at_once=1),
        _galore("galore_adamw_8bit", "GaLore", packages=("galore_torch", "bitsandbytes"), bits=8),
        _galore(
            "galore_adamw_8bit_layerwise", "GaLore", packages=("galore_torch", "bitsandbytes"), bits=8,
            gradients_at_once=1,
        ),
        _galore("galore_adafactor", "GaLore, Adafactor"),
        _galore("galore_adafactor_layerwise", "GaLore, Adafactor", gradients_at_once=1),
        _apollo("apollo_adamw", "APOLLO", "apollo"),
        _apollo("apollo_adamw_layerwise", "APOLLO", "apollo-layerwise", gradients_at_once=1),
        _lomo("lomo", "LOMO", "lomo", states=_NONE),
        # Its states go to CUDA without asking (lomo-optim 0.1.1: adalomo.py 92-101).
        _lomo("adalomo", "AdaLomo", "adalomo", states=_FACTORED, on_cpu=False),
        Optimizer(
            "grokadamw", "GrokAdamW", packages=("grokadamw",),
            reads=("alpha_init", "lamb", "gamma", "grokking_signal_decay_rate", "gradient_clipping"),
        ),
        Optimizer("schedule_free_radam", "schedule-free RAdam", packages=("schedulefree",), reads=_SCHEDULE_FREE),
        Optimizer("schedule_free_adamw", "schedule-free AdamW", packages=("schedulefree",), reads=_SCHEDULE_FREE),
        Optimizer("schedule_free_sgd", "schedule-free SGD", packages=("schedulefree",), reads=_SCHEDULE_FREE),
        Optimizer(  # it compensates 16-bit weights by itself (torch-optimi: optimi/stableadamw.py 121-123)
            "stable_adamw", "StableAdamW", packages=("optimi",), reads=("max_lr", "kahan_sum", "decouple_lr"),
            rounding="compensated",
        ),
    )
}  # fmt: skip
"""Values of `optim` (transformers 5.23.0: training_args.py, `OptimizerNames`) → what is known of them. `reads` and
`takes`: trainer_optimizer.py 195-560. `deepspeed`: what accelerate puts in their place on the CPU (accelerate 1.15.0:
utils/deepspeed.py 27-104). `rounding`, where it is "tried": Lv et al. 2023, arXiv 2306.09782 and 2310.10195; Zhao et
al. 2024, arXiv 2403.03507; Zhu et al. 2024, arXiv 2412.05270."""

_OURS: Final = "hf_memkit.*"

CLASSES: Final[tuple[Optimizer, ...]] = (
    Optimizer(
        f"{_OURS}.low_bit_adamw:*8bit", "AdamW", "adamw-8bit-stochastic", ("torchao",),
        _torchao(8, TORCHAO_BLOCKS[8], wide_rest=True), 8, rounding="stochastic", compiled=True,
    ),
    Optimizer(
        f"{_OURS}.low_bit_adamw:*4bit", "AdamW", "adamw-4bit-stochastic", ("torchao",),
        _torchao(4, TORCHAO_BLOCKS[4], wide_rest=True), 4, rounding="stochastic", compiled=True,
    ),
    Optimizer(
        "torchao.*:*8bit*", "AdamW", "", ("torchao",), _torchao(8, TORCHAO_BLOCKS[8], wide_rest=False), 8,
        rounding="stochastic",
    ),
    Optimizer(
        "torchao.*:*", "AdamW", "", ("torchao",), _torchao(4, TORCHAO_BLOCKS[4], wide_rest=False), 4,
        rounding="stochastic",
    ),
    Optimizer(
        f"{_OURS}.stochastic_adafactor:Adafactor", "Adafactor", "adafactor-stochastic", (), _FACTORED,
        takes=_RATE_ONLY, rounding="stochastic",
    ),
    Optimizer("*:Adafactor", "Adafactor", states=_FACTORED, takes=_RATE_ONLY),
    Optimizer(
        f"{_OURS}.large_batch_optimizers:LARS", "LARS", "lars", ("bitsandbytes",), _moments(1, fp32=True),
        takes=_RATE_ONLY,
    ),
    Optimizer(f"{_OURS}.large_batch_optimizers:LAMB", "LAMB", "lamb", ("bitsandbytes",), _moments(2, fp32=True)),
    Optimizer("*:LARS", "LARS", states=_moments(1, fp32=True)),
    Optimizer("*:LAMB", "LAMB", states=_moments(2, fp32=True)),
    Optimizer("*:AdamW", "AdamW", "adamw-loop"),
    Optimizer("*:Adam", "Adam"),
    Optimizer("*:SGD", "SGD", states=_SGD, takes=_RATE_ONLY),
    Optimizer("*:AdaLomo", "AdaLomo", "", ("lomo_optim",), _FACTORED, on_cpu=False, rounding="tried"),
    Optimizer("*:Lomo", "LOMO", "", ("lomo_optim",), _NONE, rounding="tried"),
)  # fmt: skip
"""Classes that Trainer can be given (a setup's `optimizer.class`, `module:Class`); the first that matches counts."""

_UNKNOWN: Final = Optimizer("")


def find_optimizer(name: str) -> Optimizer:
    """The row of a value of `optim`, or of `module:Class`; one that says nothing if it is not known.

    >>> find_optimizer("paged_adamw_8bit").unpaged, find_optimizer("torch.optim.adamw:AdamW").algorithm
    ('adamw_bnb_8bit', 'AdamW')
    """
    if ":" not in name:
        return OPTIMIZERS.get(name, _UNKNOWN)
    return next((row for row in CLASSES if fnmatchcase(name.lower(), row.name.lower())), _UNKNOWN)


def install_command(package: str) -> str:
    """What installs a package, by its import name.

    >>> install_command("optimi"), install_command("liger_kernel")
    ('pip install torch-optimi', 'pip install liger-kernel')
    """
    return f"pip install {_DISTRIBUTIONS.get(package, package.replace('_', '-'))}"


def paged_form(optim: str) -> str:
    """The paged value of `optim` that takes the place of this one: of bitsandbytes' own the same, otherwise AdamW's in
    8 bits."""
    row = find_optimizer(optim)
    return next(
        (
            one.name
            for one in OPTIMIZERS.values()
            if one.unpaged and (one.algorithm, one.bits, one.packages) == (row.algorithm, row.bits, row.packages)
        ),
        "paged_adamw_8bit",
    )


def techniques_of(rows: Callable[[Optimizer], bool]) -> tuple[str, ...]:
    """Techniques that choose an optimizer for which `rows` is true."""
    known: Iterable[Optimizer] = (*OPTIMIZERS.values(), *CLASSES)
    return tuple(row.technique for row in known if row.technique and rows(row))
