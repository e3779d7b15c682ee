"""Table of optimizers: a row for each value of Trainer's `optim`, and for classes passed to Trainer.

Techniques, rules, predictions, advice and rehearsals read these rows. docs/contributing.md shows how to add one.

Bytes of states are computed from the shapes of the trained parameters; tests compare every formula with the tensors
that the real optimizer holds after a step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from typing import Final, Literal

SMALLEST_QUANTISED: Final = 4096
"""Minimum elements of a quantised state (bitsandbytes 0.50.2: optim/optimizer.py 508; torchao: optim/adam.py 78)."""

_DISTRIBUTIONS: Final = {"optimi": "torch-optimi"}
"""Import name → pip's name, if they differ by more than `_` and `-`."""

_BNB_BLOCK: Final = 256
"""bitsandbytes 0.50.2: optim/optimizer.py 528."""

TORCHAO_BLOCKS: Final = {8: 256, 4: 128}
"""Bits → elements that share a scale by default (torchao 0.18.0: optim/adam.py, `block_size`)."""

_TABLE_ENTRIES: Final = {8: 256, 4: 16}
"""Bits → entries of torchao's lookup table for a state (torchao 0.18.0: optim/quant_utils.py)."""

_WORD: Final = 4  # bytes of fp32


@dataclass(frozen=True, slots=True)
class Shapes:
    """Shapes of the trained parameters, tied ones once.

    Attributes:
        matrices: (rows, columns) of the weights of linear layers, as stored.
        embeddings: (rows, columns) of embeddings, including one tied to the output layer.
        vectors: elements of all other parameters.
        projected: number of `matrices`, from the first on, that GaLore and APOLLO project; None: all.
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
    """Bytes of an optimizer's states: `quantised` ones with their scales and tables, and the others (`plain`)."""

    quantised: int
    plain: int

    @property
    def total(self) -> int:
        return self.quantised + self.plain


@dataclass(frozen=True, slots=True)
class Options:
    """Settings that a formula may depend on.

    Attributes:
        weight_bytes: bytes of a parameter's element; torch's optimizers keep their states in that dtype.
        rank: rank of GaLore's and APOLLO's projections.
        momentum: whether SGD has a momentum.
    """

    weight_bytes: int = 4
    rank: int = 128
    momentum: bool = True


@dataclass(frozen=True, slots=True)
class Formula:
    """Bytes of an optimizer's states.

    Attributes:
        bytes_of: computes them from the shapes and options.
        source: the formula in words; `{weight_bytes}` stands for the bytes of a parameter's element.
    """

    bytes_of: Callable[[Shapes, Options], States]
    source: str

    @property
    def bytes_a_parameter(self) -> float:
        """Bytes per parameter for one fp32 matrix of 4096 × 4096."""
        return self.bytes_of(Shapes(((4096, 4096),)), Options()).total / 4096**2


def _moments(count: Literal[1, 2], *, fp32: bool = False) -> Formula:
    """`count` numbers a parameter, in the weights' dtype or in fp32."""

    def states(shapes: Shapes, options: Options) -> States:
        return States(0, count * (_WORD if fp32 else options.weight_bytes) * sum(shapes.sizes))

    number = "4" if fp32 else "{weight_bytes}"
    if count == 1:
        return Formula(states, f"one moment: {number} bytes a parameter")
    return Formula(states, f"two moments: {number} bytes each a parameter")


def _bitsandbytes(moments: int) -> Formula:
    """States in 8 bits; Trainer keeps those of embeddings in 32 (transformers 5.23.0: trainer.py 1331-1344)."""

    def states(shapes: Shapes, options: Options) -> States:
        candidates = (*(rows * columns for rows, columns in shapes.matrices), *shapes.vectors)
        eight = [size for size in candidates if size >= SMALLEST_QUANTISED]
        rest = sum(shapes.sizes) - sum(eight)
        return States(moments * sum(size + _WORD * -(-size // _BNB_BLOCK) for size in eight), moments * _WORD * rest)

    bytes_each = "1 + 4/256" if moments == 1 else f"{moments} × (1 + 4/256)"
    wide = f"{moments * _WORD} for embeddings and below {SMALLEST_QUANTISED} elements"
    return Formula(states, f"{bytes_each} bytes a parameter, {wide} (bitsandbytes)")


def _torchao(bits: Literal[4, 8], block: int, *, wide_rest: bool) -> Formula:
    """Two moments in `bits` each: codes, a scale for each block, and a table for each state (torchao 0.18.0:
    optim/subclass_8bit.py, `zeros`). `wide_rest`: unquantised states are in fp32, not in the weights' dtype."""

    def states(shapes: Shapes, options: Options) -> States:
        sizes = shapes.sizes
        quantised = [size for size in sizes if size >= SMALLEST_QUANTISED and size % block == 0]
        moment = sum(size * bits // 8 + _WORD * (size // block) + _WORD * _TABLE_ENTRIES[bits] for size in quantised)
        rest = _WORD if wide_rest else options.weight_bytes
        return States(2 * moment, 2 * rest * (sum(sizes) - sum(quantised)))

    number = "1" if bits == 8 else "1/2"
    exceptions = f"more below {SMALLEST_QUANTISED} elements or not divisible by {block}"
    source = f"2 × ({number} + 4/{block}) bytes a parameter (torchao); {exceptions}"
    return Formula(states, source)


def _low_rank_states(shapes: Shapes, options: Options) -> States:
    """A projected matrix has two moments of (longer side) × rank and a projector of rank × (shorter side); other
    parameters have AdamW's states (Zhao et al. 2024, arXiv 2403.03507; Zhu et al. 2024, arXiv 2412.05270)."""
    chosen = shapes.matrices if shapes.projected is None else shapes.matrices[: shapes.projected]
    projected = 0
    for rows, columns in chosen:
        short, long = sorted((rows, columns))
        projected += (2 * long + short) * min(options.rank, short)
    rest = sum(shapes.sizes) - sum(rows * columns for rows, columns in chosen)
    return States(0, options.weight_bytes * (projected + 2 * rest))


_ADAMW: Final = _moments(2)
_SGD: Final = Formula(
    lambda shapes, options: States(0, options.weight_bytes * sum(shapes.sizes) * options.momentum),
    "one moment: {weight_bytes} bytes a parameter",
)
_FACTORED: Final = Formula(
    lambda shapes, _: States(0, _WORD * sum(map(sum, (*shapes.matrices, *shapes.embeddings, shapes.vectors)))),
    "4 bytes × (rows + columns) a matrix (Shazeer & Stern 2018, arXiv 1804.04235)",
)
_NONE: Final = Formula(lambda shapes, options: States(0, 0), "none")
_LOW_RANK: Final = Formula(
    _low_rank_states,
    "{weight_bytes} bytes × (2 × longer side + shorter side) × rank a projected matrix; two moments of the rest",
)

Rounding = Literal["nearest", "stochastic", "compensated", "tried"]
"""Rounding of 16-bit weights, for updates below their precision. `nearest`: they are lost. `stochastic`: they are kept
on average. `compensated`: a second tensor keeps them (Kahan summation). `tried`: they are lost, but the optimizer's
authors train 16-bit weights with it and report the results."""


@dataclass(frozen=True, slots=True)
class Optimizer:
    """One optimizer.

    Attributes:
        name: a value of `optim`; or an `fnmatch` pattern of `module:Class`, in any case.
        algorithm: its algorithm. Two rows of one algorithm compute the same except for rounding.
        technique: the technique that selects it; empty if none.
        packages: import names of its packages beyond the core dependencies; `install_command` installs them.
        states: bytes of its states; AdamW's formula if its own is unknown.
        bits: bits of a state.
        reads: options in `optim_args` that Trainer reads for it; None: it accepts all.
        takes: Trainer's Adam settings that it receives, by their names in constructors.
        takes_groups: whether it gets Trainer's parameter groups, which carry the weight decay.
        gradients_at_once: maximum gradients in memory, if the backward pass frees them; None: all, until the step.
        low_rank: whether it projects the gradients of linear layers.
        unpaged: the same optimizer without CUDA's managed memory; empty if this one does not use it.
        on_cpu: whether it works on a CPU.
        rounding: of 16-bit weights.
        rounding_option: option that enables `rounding`; empty if it is always on.
        foreach: whether it updates all parameters together, with temporaries as large as all of them.
        deepspeed: name in DeepSpeed's JSON of its optimizer with the same algorithm and states; empty if none.
        compiled: whether its step is compiled.
        dtensors: whether it steps weights that FSDP2 shards (DTensors); assumed of those that nobody has tried.
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
    dtensors: bool = True


_ADEMAMIX: Final = ("beta1", "beta2", "beta3", "alpha", "eps", "t_alpha", "t_beta3")
_SCHEDULE_FREE: Final = ("weight_lr_power", "r")
_TORCHAO_READS: Final = ("block_size", "bf16_stochastic_round")
_RATE_ONLY: Final = ()
"""It receives none of Adam's settings: only the learning rate, and its options in `optim_args`."""
_GALORE_READS: Final = ("rank", "update_proj_gap", "scale", "proj_type")

_bnb = partial(Optimizer, packages=("bitsandbytes",), dtensors=False)
_galore = partial(
    Optimizer, packages=("galore_torch",), reads=_GALORE_READS, takes=_RATE_ONLY, takes_groups=False, low_rank=True,
    rounding="tried",
)  # fmt: skip
_apollo = partial(
    Optimizer, packages=("apollo_torch",), reads=(*_GALORE_READS, "proj", "scale_type"), takes_groups=False,
    low_rank=True, states=_LOW_RANK, rounding="tried", dtensors=False,
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
        # Trainer gives both a block of 256 (transformers 5.23.0: trainer_optimizer.py 470), without an option to
        # change it; rounding is to nearest by default (472).
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
        Optimizer("adafactor", "Adafactor", "adafactor", states=_FACTORED, takes=_RATE_ONLY, dtensors=False),
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
        _galore("galore_adamw_8bit", "GaLore", packages=("galore_torch", "bitsandbytes"), bits=8, dtensors=False),
        _galore(
            "galore_adamw_8bit_layerwise", "GaLore", packages=("galore_torch", "bitsandbytes"), bits=8,
            gradients_at_once=1, dtensors=False,
        ),
        _galore("galore_adafactor", "GaLore, Adafactor", dtensors=False),
        _galore("galore_adafactor_layerwise", "GaLore, Adafactor", gradients_at_once=1, dtensors=False),
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
        Optimizer(  # compensates 16-bit weights by default (torch-optimi: optimi/stableadamw.py 121-123)
            "stable_adamw", "StableAdamW", packages=("optimi",), reads=("max_lr", "kahan_sum", "decouple_lr"),
            rounding="compensated",
        ),
    )
}  # fmt: skip
"""Value of `optim` (transformers 5.23.0: training_args.py, `OptimizerNames`) → its row. Sources: `reads` and `takes`:
trainer_optimizer.py 195-560; `deepspeed`: the replacements by accelerate on the CPU (accelerate 1.15.0:
utils/deepspeed.py 27-104); `rounding` "tried": Lv et al. 2023, arXiv 2306.09782 and 2310.10195; Zhao et al. 2024,
arXiv 2403.03507; Zhu et al. 2024, arXiv 2412.05270."""

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
    Optimizer("*:Adafactor", "Adafactor", states=_FACTORED, takes=_RATE_ONLY, dtensors=False),
    Optimizer(
        f"{_OURS}.large_batch_optimizers:LARS", "LARS", "lars", ("bitsandbytes",), _moments(1, fp32=True),
        takes=_RATE_ONLY, dtensors=False,
    ),
    Optimizer(
        f"{_OURS}.large_batch_optimizers:LAMB", "LAMB", "lamb", ("bitsandbytes",), _moments(2, fp32=True),
        dtensors=False,
    ),
    Optimizer("*:LARS", "LARS", states=_moments(1, fp32=True)),
    Optimizer("*:LAMB", "LAMB", states=_moments(2, fp32=True)),
    Optimizer("*:AdamW", "AdamW", "adamw-loop"),
    Optimizer("*:Adam", "Adam"),
    Optimizer("*:SGD", "SGD", states=_SGD, takes=_RATE_ONLY),
    Optimizer("*:AdaLomo", "AdaLomo", "", ("lomo_optim",), _FACTORED, on_cpu=False, rounding="tried"),
    Optimizer("*:Lomo", "LOMO", "", ("lomo_optim",), _NONE, rounding="tried"),
)  # fmt: skip
"""Classes that can be passed to Trainer (a setup's `optimizer.class`, `module:Class`); the first match counts."""

_UNKNOWN: Final = Optimizer("")


def find_optimizer(name: str) -> Optimizer:
    """The row of a value of `optim` or of `module:Class`; an empty row if it is unknown.

    >>> find_optimizer("paged_adamw_8bit").unpaged, find_optimizer("torch.optim.adamw:AdamW").algorithm
    ('adamw_bnb_8bit', 'AdamW')
    """
    if ":" not in name:
        return OPTIMIZERS.get(name, _UNKNOWN)
    return next((row for row in CLASSES if fnmatchcase(name.lower(), row.name.lower())), _UNKNOWN)


def install_command(package: str) -> str:
    """The command that installs a package, by its import name.

    >>> install_command("optimi"), install_command("liger_kernel")
    ('pip install torch-optimi', 'pip install liger-kernel')
    """
    return f"pip install {_DISTRIBUTIONS.get(package, package.replace('_', '-'))}"


def paged_form(optim: str) -> str:
    """The paged replacement of `optim`: bitsandbytes' same optimizer, otherwise AdamW in 8 bits."""
    row = find_optimizer(optim)
    for paged in OPTIMIZERS.values():
        is_same = (paged.algorithm, paged.bits, paged.packages) == (row.algorithm, row.bits, row.packages)
        if paged.unpaged and is_same:
            return paged.name
    return "paged_adamw_8bit"


def techniques_of(rows: Callable[[Optimizer], bool]) -> tuple[str, ...]:
    """Techniques that select an optimizer for which `rows` is true."""
    known: Iterable[Optimizer] = (*OPTIMIZERS.values(), *CLASSES)
    return tuple(row.technique for row in known if row.technique and rows(row))
