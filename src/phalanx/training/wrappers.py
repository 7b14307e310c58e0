"""Bringing DDP and FSDP2 back to idle after a step that broke off.

A wrapper that was left in the middle of a backward pass is not fit for another one: DDP
raises at the next forward, FSDP2 silently stops to deliver gradients. And a fresh DDP has its
gradients in buckets in the order of definition, while one that has run has them in the order
of execution; all-reduced together the gradients are wrong without an error. So

* `rest` brings the wrappers of a survivor to idle;
* `DdpWrapper.layout` is a survivor's bucket layout, `DdpWrapper.adopt` gives it to a
  replacement: one synthetic backward pass whose gradients become ready in that order.

All of this needs private names of torch. `missing_names` says which are not there; then the
program must give a rebuild callback, at start.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from phalanx.training.groups import Fabric

Layout = list[list[int]]

# Private and unexported names of torch are used all over this module.
dist: Any = torch.distributed


class UnsupportedTorch(RuntimeError):
    """This torch lacks names that the wrappers' clean-up needs."""


class LayoutMismatch(RuntimeError):
    """A DDP wrapper could not be given the bucket layout of the others."""


def missing_names(model: nn.Module) -> list[str]:
    """Private names that the clean-up of this model's wrappers needs and torch lacks."""
    missing = []
    if any(isinstance(module, DistributedDataParallel) for module in model.modules()):
        for name in (
            "_reset_state",
            "_rebuild_buckets",
            "_get_zeros_like_grad_buckets",
            "_remove_autograd_hooks",
            "prepare_for_forward",
            "prepare_for_backward",
        ):
            if not hasattr(dist.Reducer, name):
                missing.append(f"torch.distributed.Reducer.{name}")
        for name in ("_ddp_init_helper", "_build_params_for_reducer"):
            if not hasattr(DistributedDataParallel, name):
                missing.append(f"DistributedDataParallel.{name}")
    for module in model.modules():
        if not _is_fsdp(module):
            continue
        if not hasattr(module, "_get_fsdp_state"):
            missing.append("FSDPModule._get_fsdp_state")
        else:
            state: Any = _fsdp_state(module)
            if not hasattr(state, "_is_root"):
                missing.append("FSDPState._is_root")
            if not (
                hasattr(state, "_reset_iter_state")
                or hasattr(state, "_root_post_backward_final_callback")
            ):
                missing.append("FSDPState._root_post_backward_final_callback")
            if not (hasattr(state, "_fsdp_param_groups") or hasattr(state, "_fsdp_param_group")):
                missing.append("FSDPState._fsdp_param_group")
        break
    return missing


def _is_fsdp(module: nn.Module) -> bool:
    return any(kind.__name__ == "FSDPModule" for kind in type(module).__mro__)


def _fsdp_state(module: Any) -> Any:
    return module._get_fsdp_state()


class DdpWrapper:
    """One `DistributedDataParallel` of the protected models."""

    def __init__(self, ddp: DistributedDataParallel) -> None:
        self.ddp: Any = ddp
        #: whether the buckets are in the order of execution, as those of everybody who has
        #: finished a step. The owner sets it.
        self.settled = False

    def _parameters(self) -> list[nn.Parameter]:
        parameters, _ = self.ddp._build_params_for_reducer()
        return list(parameters)

    def rest(self) -> None:
        """Idle, with the buckets in the order of execution if a whole step has been run: the
        reset forgets that order where the move to it was still to come. Groups alone."""
        if self.settled:
            try:
                self.settle()
            except RuntimeError:
                # A backward pass has begun, so the forward before it has made the move.
                pass
        self.ddp.reducer._reset_state()
        self.ddp.require_forward_param_sync = True

    def settle(self) -> None:
        """Do the move to execution order that DDP does at the forward after its first
        backward. The groups must be alone. Nothing happens when it is done already."""
        self.ddp.reducer._rebuild_buckets()

    def renew(self) -> None:
        """A fresh reducer, in definition order, as the constructor makes it. Groups alone."""
        self.ddp._remove_autograd_hooks()
        parameters, sparse = self.ddp._build_params_for_reducer()
        names = self.ddp._build_debug_param_to_name_mapping(parameters)
        self.ddp._ddp_init_helper(parameters, sparse, names, self.ddp.static_graph)
        if self.ddp.static_graph:
            self.ddp.reducer._set_static_graph()
            self.ddp.logger._set_static_graph()
        self.settled = False

    def layout(self) -> Layout:
        """Indices of parameters, bucket by bucket. Needs the size of the gradients for a moment."""
        index = {id(parameter): i for i, parameter in enumerate(self._parameters())}
        return [
            [index[id(parameter)] for parameter in bucket.parameters()]
            for bucket in self.ddp.reducer._get_zeros_like_grad_buckets()
        ]

    def adopt(self, layout: Layout) -> None:
        """Take the layout of a survivor. Groups alone.

        :raises LayoutMismatch: the layout could not be reached.
        """
        if self.layout() != layout:
            self.renew()
            self._rehearse(layout)
            if (mine := self.layout()) != layout:
                raise LayoutMismatch(
                    f"DDP buckets {_short(mine)} could not be brought to those of the others, "
                    f"{_short(layout)}"
                )
        self.settled = True

    def _rehearse(self, layout: Layout) -> None:
        parameters = self._parameters()
        order = [index for bucket in layout for index in bucket]
        if sorted(order) != list(range(len(parameters))):
            raise LayoutMismatch(
                f"the others' DDP has {len(order)} parameters, this one {len(parameters)}"
            )
        before = [(parameter, parameter.grad) for parameter in parameters]
        reducer = self.ddp.reducer
        with torch.enable_grad():
            reducer.prepare_for_forward()
            reducer.prepare_for_backward([])
            for index in order:
                parameter = parameters[index]
                parameter.grad = None
                leaf = parameter.view_as(parameter)
                torch.autograd.backward(leaf, torch.zeros_like(parameter))
            reducer._rebuild_buckets()
        reducer._reset_state()
        for parameter, grad in before:
            parameter.grad = grad


def _forget_gradients(state: Any) -> None:
    """A broken backward pass may have left gradients of whole parameters, not yet reduced; torch's
    own reset leaves them, and the next backward would add to them."""
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:  # torch before 2.10 has one
        only = getattr(state, "_fsdp_param_group", None)
        groups = [] if only is None else [only]
    for group in groups:
        for parameter in group.fsdp_params:
            parameter.unsharded_accumulated_grad = None
            whole = getattr(parameter, "_unsharded_param", None)
            if whole is not None:
                whole.grad = None


def _short(layout: Layout) -> str:
    text = str(layout)
    return text if len(text) < 200 else text[:197] + "..."


def _alone(fabric: Fabric | None) -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext() if fabric is None else fabric.alone()


class Wrappers:
    """All wrappers of the protected models."""

    def __init__(self, models: Sequence[nn.Module]) -> None:
        self.ddp: list[DdpWrapper] = []
        self._known: list[Layout] | None = None
        self._fsdp: list[nn.Module] = []
        for model in models:
            for module in model.modules():
                if isinstance(module, DistributedDataParallel):
                    self.ddp.append(DdpWrapper(module))
                elif _is_fsdp(module):
                    self._fsdp.append(module)

    def rest(self, fabric: Fabric) -> None:
        """Bring all to idle after a step that broke off. Gradients are not kept.

        The groups answer as if alone meanwhile: what FSDP2 still has in flight is finished
        without anybody else.
        """
        with fabric.alone():
            for wrapper in self.ddp:
                wrapper.rest()
            for module in self._fsdp:
                state = _fsdp_state(module)
                if not state._is_root:
                    continue
                if hasattr(state, "_reset_iter_state"):
                    state._reset_iter_state()
                else:
                    state._root_post_backward_final_callback()
            for module in self._fsdp:
                _forget_gradients(_fsdp_state(module))

    def stepped(self) -> None:
        """A whole step is done: from the next forward on buckets are in execution order."""
        for wrapper in self.ddp:
            wrapper.settled = True

    @property
    def settled(self) -> bool:
        """Whether this rank's DDP wrappers (if any) have run a whole step."""
        return all(wrapper.settled for wrapper in self.ddp)

    def settle(self, fabric: Fabric | None) -> None:
        """Move buckets to execution order now, if that was to come at the next forward.

        Here and below: without a fabric (no agent) all ranks must call this together.
        """
        with _alone(fabric):
            for wrapper in self.ddp:
                wrapper.settle()

    def layouts(self, fabric: Fabric | None) -> list[Layout]:
        """The bucket layouts, in execution order. Found out once: they do not change."""
        if self._known is None:
            self.settle(fabric)
            self._known = [wrapper.layout() for wrapper in self.ddp]
        return self._known

    def adopt(self, layouts: list[Layout], fabric: Fabric | None) -> None:
        """:raises LayoutMismatch: see `DdpWrapper.adopt`."""
        if len(layouts) != len(self.ddp):
            raise LayoutMismatch(
                f"the others have {len(layouts)} DDP wrappers, not {len(self.ddp)}"
            )
        self._known = None
        with _alone(fabric):
            for wrapper, layout in zip(self.ddp, layouts, strict=True):
                wrapper.adopt(layout)

    def resize(self, fabric: Fabric) -> None:
        """Forget how many ranks there were; the buckets stay as they are."""
        layouts = self.layouts(fabric) if self.ddp and self.settled else None
        self.renew(fabric)
        if layouts is not None:
            self.adopt(layouts, fabric)

    def renew(self, fabric: Fabric) -> None:
        """All as fresh from the constructor."""
        self._known = None
        with fabric.alone():
            for wrapper in self.ddp:
                wrapper.renew()
