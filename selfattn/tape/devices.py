"""What texts ask of devices, processes and precision: there is one process on the CPU alone."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

from selfattn.tape.generator import manual_seed


def _nothing(*args: Any, **kwargs: Any) -> None:
    """Do nothing."""


def _no(*args: Any, **kwargs: Any) -> bool:
    """Return False."""
    return False


def _number(n: int) -> Callable[..., int]:
    return lambda *args, **kwargs: n


def _refused(name: str, why: str = "there is one process, on the CPU") -> type[Any]:
    """Return a class, or a function, that cannot be called."""

    def refuse(self: Any, *args: Any, **kwargs: Any) -> None:
        raise RuntimeError(f"selfattn.tape has no {name}: {why}")

    return type(name, (), {"__init__": refuse, "__doc__": f"Refused: {why}."})


class autocast:  # noqa: N801 # PyTorch's name
    """A context that has no effect; one of 16 bits is refused.

    Parameters
    ----------
    device_type : str
    dtype : dtype, optional
    enabled : bool, default True
    """

    def __init__(
        self, device_type: str = "cpu", dtype: Any = None, enabled: bool = True, **options: Any
    ) -> None:
        if enabled and getattr(dtype, "itemsize", 4) < 4:
            raise RuntimeError(f"selfattn.tape has no mixed precision: leave autocast of {dtype} out")

    def __enter__(self) -> None:
        pass

    def __exit__(self, *error: Any) -> None:
        pass


class GradScaler:
    """The scale of losses in mixed precision, which is 1 here.

    Parameters
    ----------
    **options
        Of no effect.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        pass

    def scale(self, outputs: Any) -> Any:
        """Return the loss itself."""
        return outputs

    def unscale_(self, optimizer: Any) -> None:
        """Do nothing."""

    def step(self, optimizer: Any) -> Any:
        """Call the optimiser's step."""
        return optimizer.step()

    def update(self) -> None:
        """Do nothing."""

    def state_dict(self) -> dict[str, Any]:
        """Return nothing to save."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Do nothing."""


def compile(model: Any = None, **options: Any) -> Any:
    """Return the model or function itself; as a decorator with options, too."""
    return model if model is not None else lambda function: function


def checkpoint(function: Callable[..., Any], *args: Any, use_reentrant: Any = None, **kwargs: Any) -> Any:
    """Call the function; its values are kept, and not computed again."""
    return function(*args, **kwargs)


def module(name: str, **members: Any) -> Any:
    """Return a module of PyTorch of which there is little to say."""
    made = ModuleType(f"selfattn.tape.{name}", f"What texts call of ``torch.{name}``.")
    made.__dict__.update(members)
    return made


amp = module("amp", autocast=autocast, GradScaler=GradScaler)
cuda = module(
    "cuda",
    amp=amp,
    is_available=_no,
    is_bf16_supported=_no,
    device_count=_number(0),
    empty_cache=_nothing,
    synchronize=_nothing,
    set_device=_nothing,
    manual_seed=manual_seed,
    manual_seed_all=manual_seed,
)
mps = module("mps", is_available=_no, is_built=_no, manual_seed=manual_seed)
# Settings that scripts assign, and that have no effect.
backends = module(
    "backends",
    mps=mps,
    cuda=SimpleNamespace(matmul=SimpleNamespace(allow_tf32=False), is_built=_no),
    cudnn=SimpleNamespace(allow_tf32=False, benchmark=False, deterministic=True, enabled=False),
)
distributed = module(
    "distributed",
    is_available=_no,
    is_initialized=_no,
    get_rank=_number(0),
    get_world_size=_number(1),
    init_process_group=_refused("distributed.init_process_group"),
    destroy_process_group=_nothing,
)
multiprocessing = module("multiprocessing", spawn=_refused("multiprocessing.spawn"))
parallel = module(
    "nn.parallel",
    DataParallel=_refused("nn.parallel.DataParallel"),
    DistributedDataParallel=_refused("nn.parallel.DistributedDataParallel"),
)
samplers = module(
    "utils.data.distributed", DistributedSampler=_refused("utils.data.distributed.DistributedSampler")
)
checkpoints = module("utils.checkpoint", checkpoint=checkpoint)
set_float32_matmul_precision = set_num_threads = use_deterministic_algorithms = _nothing
