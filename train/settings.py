"""What a training run can be told: frozen dataclasses whose checks refuse what cannot work.

Every field carries its meaning, which `train --help` shows; settings_build.py fills them from text.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, TypeVar

from laneformer.config import LaneConfig
from laneformer.config_json import ConfigError, nearest
from laneformer.presets import PRESETS
from laneformer.train.mixture import Phase

T = TypeVar("T")
LR_SHAPES = ("cosine", "warmup-stable-decay")
PRECISIONS = ("float32", "bfloat16", "float64")
OPTIMIZERS = ("adamw", "muon")
WANDB = ("off", "offline", "online")
SHARDINGS = ("ddp", "fsdp")
# The tokenizer decides the first three, the training precision the last.
NOT_FOR_MODEL = ("bos_token_id", "eos_token_id", "pad_token_id", "torch_dtype")


def setting(default: T, meaning: str) -> T:
    """A dataclass field with its meaning, which `train --help` shows."""
    return field(default=default, metadata={"meaning": meaning})


@dataclass(frozen=True)
class DataSettings:
    """What is learnt, and how it is cut into sequences."""

    folders: tuple[str, ...] = setting((), "folders of tokenised shards (laneformer data tokenize), instead of corpus")
    phases: tuple[Phase, ...] = setting(
        (), "mixtures one after another, [{until: share of the steps, weights: {source: weight}}]; by tokens if empty"
    )
    sequence_length: int = setting(256, "tokens a sequence")
    batch: int = setting(16, "sequences a step, over all ranks")
    micro_batch: int | None = setting(None, "sequences at once on a rank; gradients of the others add up; all if null")
    document_mask: bool = setting(True, "whether attention stays within a document of a packed sequence")
    infilling: float = setting(0.0, "share of documents rearranged for infilling")
    infilling_spm: float = setting(0.5, "share of those in the order suffix, prefix, middle")
    verify: bool = setting(True, "whether the shards' hashes are checked at the start")
    valid_bytes: int = setting(100_000, "bytes of held-out text measured at most, of each source")
    suffixes: tuple[str, ...] = setting((".md", ".py", ".rst", ".txt"), "corpus: names of files end with one of these")
    exclude: tuple[str, ...] = setting(
        (".git", ".venv", "__pycache__", "node_modules", "site-packages"),
        "corpus: folders of these names are not entered",
    )
    valid_fraction: float = setting(0.05, "corpus: share of the files (of the text, if one file) held out")

    def __post_init__(self) -> None:
        at_least(self, "data", valid_bytes=1, sequence_length=1, batch=1)
        if self.micro_batch is not None:
            at_least(self, "data", micro_batch=1)
        if not 0 < self.valid_fraction < 1:
            raise ConfigError(f"data.valid_fraction must lie between 0 and 1, got {self.valid_fraction}")
        for name in ("infilling", "infilling_spm"):
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigError(f"data.{name} is a share of 0 to 1, got {getattr(self, name)}")


@dataclass(frozen=True)
class OptimSettings:
    """The optimizer, the loss's extra terms, and the learning rate over the run."""

    name: str = setting("adamw", "adamw, or muon: Muon for the lanes' matrices, AdamW for the rest")
    lr: float = setting(3e-3, "highest learning rate")
    muon_lr: float | None = setting(None, "Muon's highest rate, scaled to AdamW's update size; lr if null")
    muon_momentum: float = setting(0.95, "Muon's decay of the summed gradient")
    lr_shape: str = setting("cosine", " or ".join(LR_SHAPES))
    warmup: float = setting(0.05, "share of the steps over which the rate rises")
    decay: float = setting(0.25, "share of the steps over which it falls (warmup-stable-decay only)")
    final: float = setting(0.1, "rate at the end as a share of the highest")
    beta1: float = setting(0.9, "AdamW's decay of the mean gradient")
    beta2: float = setting(0.95, "AdamW's decay of the mean squared gradient")
    eps: float = setting(1e-8, "AdamW's epsilon")
    weight_decay: float = setting(0.1, "decoupled weight decay; none on norms and the embedding")
    clip: float = setting(1.0, "largest gradient norm; larger ones are scaled down to it")
    z_loss: float = setting(0.0, "weight of the mean squared log-normaliser, which keeps logits from drifting")
    most_skipped: int = setting(10, "steps in a row without a finite loss and gradient that end the run")

    def __post_init__(self) -> None:
        one_of("optim.name", self.name, OPTIMIZERS)
        one_of("optim.lr_shape", self.lr_shape, LR_SHAPES)
        at_least(self, "optim", warmup=0, decay=0, final=0, beta1=0, beta2=0, weight_decay=0, z_loss=0,
                 muon_momentum=0, most_skipped=1)  # fmt: skip
        for name in ("lr", "eps", "clip", *(() if self.muon_lr is None else ("muon_lr",))):
            if not getattr(self, name) > 0:
                raise ConfigError(f"optim.{name} must be above 0, got {getattr(self, name)}")
        for name in ("beta1", "beta2", "muon_momentum"):
            if not getattr(self, name) < 1:
                raise ConfigError(f"optim.{name} must be below 1, got {getattr(self, name)}")
        decay = self.decay if self.lr_shape == "warmup-stable-decay" else 0
        if self.warmup + decay > 1:
            raise ConfigError(
                f"optim.warmup {self.warmup} and optim.decay {decay} are shares of one run and add up to more than 1"
            )


@dataclass(frozen=True)
class ParallelSettings:
    """How the ranks that torchrun started share the work: ranks = data-parallel groups x ranks that share the lanes."""

    lanes: int = setting(1, "ranks that share the lanes, whose partials travel between them as the schedule says")
    shard: str = setting("ddp", "ddp: whole weights on each data-parallel rank; fsdp: sharded over them (FSDP2)")
    timeout: float = setting(600.0, "seconds a rank waits for another before the run is ended")

    def __post_init__(self) -> None:
        one_of("parallel.shard", self.shard, SHARDINGS)
        at_least(self, "parallel", lanes=1, timeout=1)


@dataclass(frozen=True)
class LogSettings:
    """How often something is written down, and where."""

    every: int = setting(10, "steps between lines of log.jsonl")
    valid_every: int = setting(200, "steps between validations; 0 for one at the end only")
    wandb: str = setting("off", f"{', '.join(WANDB)}: whether the log goes to Weights & Biases too")
    project: str = setting("laneformer", "Weights & Biases project")
    peak_flops: float | None = setting(None, "device's FLOP/s for MFU; from its name if null, where that is known")

    def __post_init__(self) -> None:
        at_least(self, "log", every=1, valid_every=0)
        one_of("log.wandb", self.wandb, WANDB)


@dataclass(frozen=True)
class CheckpointSettings:
    """When the state of the run is saved, from which it can be resumed."""

    every: int = setting(200, "steps between checkpoints; 0 for none but the last weights")
    keep: int = setting(2, "newest checkpoints kept")
    permanent: int = setting(0, "steps between checkpoints that are never deleted; 0 for none")

    def __post_init__(self) -> None:
        at_least(self, "checkpoint", every=0, keep=1, permanent=0)


@dataclass(frozen=True)
class Settings:
    """One training run; raises ConfigError (a ValueError) for what cannot work."""

    corpus: str = setting("", "text to learn: a folder, walked in sorted order, or one file; or give data.folders")
    out: str = setting("", "folder for the log, the settings and the checkpoints (required)")
    init_from: str | None = setting(None, "checkpoint folder whose weights (and tokenizer) the run starts from")
    tokenizer: str | None = setting(None, "corpus: tokenizer.json to adopt; one of model.vocab_size is trained if null")
    schedule: str = setting("checkpoint", "when lanes sync: tensor-parallel, delayed:D, ladder, silent, or the model's")
    zero_outputs: bool = setting(
        False, "whether fresh wo and w2 are zero instead of random, so that every module starts out adding nothing"
    )
    steps: int = setting(300, "optimizer steps")
    seed: int = setting(0, "of the initial weights and of the data order")
    device: str = setting("cpu", "cpu or cuda")
    precision: str = setting("float32", "bfloat16 computes under autocast over float32 weights; float64 for checks")
    compile: bool = setting(False, "whether torch.compile fuses the model; the first step takes a minute longer")
    recompute: bool = setting(False, "whether modules are computed anew in the backward pass, which saves memory")
    threads: int | None = setting(None, "CPU threads a rank; PyTorch's own choice if null")
    resume: bool = setting(
        False, "whether a run that out holds goes on where it stopped; one is started if none is there"
    )
    overwrite: bool = setting(False, "whether a run that out holds already is deleted first")
    data: DataSettings = field(default_factory=DataSettings)
    optim: OptimSettings = field(default_factory=OptimSettings)
    parallel: ParallelSettings = field(default_factory=ParallelSettings)
    log: LogSettings = field(default_factory=LogSettings)
    checkpoint: CheckpointSettings = field(default_factory=CheckpointSettings)
    model: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.out:
            raise ConfigError("out is not given; add out=FOLDER")
        if bool(self.corpus) == bool(self.data.folders):
            given = "both are" if self.corpus else "neither is"
            raise ConfigError(f"one of corpus=FOLDER_OR_FILE and data.folders=[FOLDER] is needed, {given} given")
        if self.resume and self.overwrite:
            raise ConfigError("resume=true and overwrite=true contradict each other; give one of them")
        one_of("precision", self.precision, PRECISIONS)
        at_least(self, "", steps=1, seed=0)
        if self.threads is not None:
            at_least(self, "", threads=1)

    def lane_config(self) -> LaneConfig:
        """The model's sizes: the preset with what `model` changes; raises ConfigError where they cannot work."""
        changes = dict(self.model)
        preset = changes.pop("preset", "demo")
        one_of("model.preset", preset, tuple(PRESETS))
        config = LaneConfig.preset(preset, **changes)
        self.check_length(config)
        return config

    def check_length(self, config: LaneConfig) -> None:
        """Raises ConfigError for sequences that are longer than the model's context."""
        if self.data.sequence_length > config.max_position_embeddings:
            raise ConfigError(
                f"data.sequence_length {self.data.sequence_length} exceeds the model's max_position_embeddings "
                f"{config.max_position_embeddings}; shorten the one or raise model.max_position_embeddings"
            )


def at_least(settings: Any, section: str, **limits: float) -> None:
    """Raises ConfigError for the first setting below its limit."""
    for name, limit in limits.items():
        value = getattr(settings, name)
        if not value >= limit:
            raise ConfigError(f"{f'{section}.{name}'.lstrip('.')} must be at least {limit}, got {value}")


def one_of(key: str, value: str, choices: tuple[str, ...]) -> None:
    """Raises ConfigError unless the value is among the choices."""
    if value not in choices:
        raise ConfigError(f"{key} is {value!r}, expected one of {', '.join(choices)}{nearest(value, choices)}")
