"""Random runs of an optimizer, in any order of calls, beside a model of what must come out.

The model holds every parameter as one contiguous FP32 tensor and updates it alone with the kernel, which
test_properties.py compares with the reference. So it knows nothing of groups, layouts, half types, launch tables and
their reuse, scalers, checkpoints and copies: all of that must not change a bit.
"""

from __future__ import annotations

import copy
import io
import math
import pickle

import cases
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from property_values import DTYPES, gradient_scales, hyperparameters, layouts, max_grad_norms, tensors

import ruda_torch
from ruda_optim.fused_adamw import AdamWOptions, FusedAdamWError, GradientGuardOptions, StepControl, reference, storage
from ruda_optim.fused_adamw.storage import Field, LaunchTable, TensorMemory

CPU = torch.device("cpu")
SHAPES = ((), (0,), (7,), (3, 5), (2, 3, 4, 2), (1025,))
NORM = cases.norm_relative_bound(chain=17)  # blocks of a row add up to 16 squares in FP32


class Twin:
    """One parameter as it must be: contiguous FP32, whatever the optimizer makes of it."""

    def __init__(self, parameter, amsgrad):
        self.dtype, self.amsgrad = parameter.dtype, amsgrad
        self.value = parameter.detach().float().contiguous().clone()
        self.moments = None
        self.step = 0

    def update(self, gradient, group, control, clip_factor):
        options = AdamWOptions(
            float(group["lr"]),
            *map(float, group["betas"]),
            group["eps"],
            group["weight_decay"],
            amsgrad=self.amsgrad,
            maximize=group["maximize"],
        )
        first = self.moments is None
        if first:
            self.moments = [torch.zeros_like(self.value) for _ in range(3 if self.amsgrad else 2)]
        if self.value.numel():
            gradient = gradient.float().contiguous()  # kept here: a table does not keep gradients alive
            table = LaunchTable([TensorMemory(gradient, self.value, *self.moments, first=first)], CPU)
            table.fields[Field.COEFFICIENTS, 0] = 0
            row = storage.coefficient_table([options.prepare_step(self.step, control)])
            storage.adamw_scaled(table, row, control.inverse_scale, clip_factor)
        self.step += 1


def same(what, actual, expected):
    """Equal bits; any NaN for a NaN."""
    actual, expected = actual.detach().contiguous(), expected.contiguous()
    assert actual.dtype is expected.dtype, what
    assert actual.shape == expected.shape, what
    integer = torch.int32 if actual.dtype is torch.float32 else torch.int16
    equal = (actual.view(integer) == expected.view(integer)) | (actual.isnan() & expected.isnan())
    assert bool(equal.all()), f"{what}: got {actual}, expected {expected}"


def joined(high, remainder):
    """The FP32 value of a split master."""
    bits = (high.detach().contiguous().view(torch.int16).to(torch.int64) & 0xFFFF) << 16
    bits |= remainder.contiguous().view(torch.int16).to(torch.int64) & 0xFFFF
    bits = (bits - ((bits & 0x8000) << 1)) & 0xFFFFFFFF
    return torch.where(bits < 2**31, bits, bits - 2**32).to(torch.int32).view(torch.float32)


class Runs(RuleBasedStateMachine):
    """What a training script may do between one step and the next."""

    @initialize(
        data=st.data(),
        max_norm=max_grad_norms,
        check_finite=st.booleans(),
        hierarchical=st.booleans(),
        split=st.booleans(),
    )
    def start(self, data, max_norm, check_finite, hierarchical, split):
        self.split = split
        self.settings = {
            "fused_step": True,
            "max_grad_norm": max_norm,
            "check_finite": check_finite,
            "hierarchical_stats": hierarchical,
            "split_master": split,
        }
        self.twins = []
        self.skipped = 0
        self.optimizer = ruda_torch.AdamW([self.drawn_group(data)], **self.settings)

    def drawn_group(self, data):
        group = {**data.draw(hyperparameters), "amsgrad": data.draw(st.booleans()), "params": []}
        group["betas"] = tuple(map(float, group["betas"]))
        for _ in range(data.draw(st.integers(0, 3))):
            shape = data.draw(st.sampled_from(SHAPES))
            dtype = data.draw(st.sampled_from(("float32", "bfloat16") if self.split else DTYPES))
            parameter = torch.nn.Parameter(data.draw(tensors(shape, dtype, finite=True, magnitudes=(-3, 3))))
            parameter.grad_dtype = None
            group["params"].append(parameter)
            self.twins.append(Twin(parameter, group["amsgrad"]))
        return group

    @property
    def entries(self):
        """(parameter, group, twin) of everything."""
        groups = self.optimizer.param_groups
        parameters = [(p, group) for group in groups for p in group["params"]]
        return [(p, group, twin) for (p, group), twin in zip(parameters, self.twins, strict=True)]

    @rule(data=st.data())
    def give_gradients(self, data):
        for p, _, _ in self.entries:
            if data.draw(st.integers(0, 4)) == 0:
                p.grad = None
                continue
            dtype = data.draw(st.sampled_from(DTYPES))
            # Mostly harmless values, or no step would ever be taken.
            kinds = {"finite": data.draw(st.integers(0, 5)) > 0, "magnitudes": (-4, 2)}
            p.grad = data.draw(tensors(tuple(p.shape), dtype, **kinds))

    @rule(to_none=st.booleans())
    def zero_grad(self, to_none):
        self.optimizer.zero_grad(set_to_none=to_none)

    @rule(
        how=st.sampled_from(("plain", "plain", "attributes", "our scaler", "torch scaler", "unscale")),
        scale=gradient_scales,
        found_inf=st.sampled_from((0.0, 0.0, 1.0, 2.0)),
    )
    def take_a_step(self, how, scale, found_inf):
        optimizer = self.optimizer
        scale = 1.0 if scale is None or how == "plain" else scale
        if how == "unscale" and any(p.grad is not None and p.grad.dtype is torch.float16 for p, _, _ in self.entries):
            how = "our scaler"  # torch refuses to unscale FP16 gradients in place
        scaler = None
        seen_inf = False
        if how == "attributes":
            optimizer.grad_scale, optimizer.found_inf = torch.tensor(scale), torch.tensor(found_inf)
            scale = optimizer.grad_scale.item()  # as FP32 holds it
            seen_inf = found_inf > 0
        elif how != "plain":
            scaler = (torch.amp if how == "torch scaler" else ruda_torch).GradScaler("cpu", init_scale=scale)
            scaler.scale(torch.ones(()))
            scale = initial = scaler.get_scale()
        if how == "unscale":
            before = self.gradients_finite(1.0)
            scaler.unscale_(optimizer)
            seen_inf = not before or not self.gradients_finite(1.0)
            scale = 1.0
        control = StepControl(scale)
        raw_finite, finite = self.gradients_finite(1.0), self.gradients_finite(control.inverse_scale)
        if scaler is not None and how != "unscale" and not self.settings["check_finite"]:
            seen_inf = not raw_finite
        gradients = [None if p.grad is None else p.grad.clone() for p, _, _ in self.entries]

        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
        for name in ("grad_scale", "found_inf"):
            vars(optimizer).pop(name, None)

        for (p, _, _), gradient in zip(self.entries, gradients, strict=True):
            if gradient is not None:
                same("gradient", p.grad, gradient)
        skips = seen_inf or (self.settings["check_finite"] and not finite)
        assert optimizer.last_step_skipped is skips
        self.skipped += skips
        assert optimizer.skipped_steps == self.skipped
        if scaler is not None and any(gradient is not None for gradient in gradients):
            scaler.update()
            backed_off = scaler.get_scale() < initial
            # Torch's looks at stored values alone, and does not hear of what overflowed in the unscaling.
            assert backed_off is skips or (skips and how == "torch scaler") or initial == 2.0**-24
        if skips:
            return
        clip_factor = self.checked_clip_factor(gradients, control, finite)
        for (_, group, twin), gradient in zip(self.entries, gradients, strict=True):
            if gradient is not None:
                twin.update(gradient, group, control, clip_factor)

    def gradients_finite(self, inverse_scale):
        gradients = [p.grad for p, _, _ in self.entries if p.grad is not None]
        return all(bool((g.float() * inverse_scale).isfinite().all() and g.isfinite().all()) for g in gradients)

    def checked_clip_factor(self, gradients, control, finite):
        """The step's factor, after a look at the norms that it reports."""
        optimizer, max_norm = self.optimizer, self.settings["max_grad_norm"]
        factor, norm = optimizer.last_clip_factor, optimizer.last_grad_norm
        if not self.settings["check_finite"] and max_norm is None:
            assert math.isnan(norm)
            assert factor == 1.0
            return factor
        if not finite:
            assert norm == math.inf
            assert factor == (1.0 if max_norm is None else 0.0)
            return factor
        arrays = [gradient.float().numpy() for gradient in gradients if gradient is not None]
        stats = reference.gradient_stats(arrays, control.gradient_scale)
        absolute = cases.TINY * math.sqrt(stats.elements)
        assert abs(norm - stats.total_norm) <= NORM * stats.total_norm + absolute
        right = stats.decision(GradientGuardOptions(max_norm=max_norm)).clip_factor
        assert abs(factor - right) <= (NORM + 2 * cases.U) * right + (absolute / (max_norm or 1.0))
        groups = optimizer.last_group_norms
        assert len(groups) == len(optimizer.param_groups)
        assert math.hypot(*groups) == pytest.approx(norm, rel=2 * NORM, abs=absolute)
        return factor

    @rule(values=hyperparameters, number=st.integers(0, 3), tensor=st.booleans())
    def change_hyperparameters(self, values, number, tensor):
        group = self.optimizer.param_groups[number % len(self.optimizer.param_groups)]
        group.update(values, betas=tuple(map(float, values["betas"])))
        if tensor:
            group["lr"] = torch.tensor(group["lr"])

    @rule(max_norm=max_grad_norms)
    def change_max_grad_norm(self, max_norm):
        self.optimizer.max_grad_norm = self.settings["max_grad_norm"] = max_norm

    @precondition(lambda self: len(self.optimizer.param_groups) < 3)
    @rule(data=st.data())
    def add_group(self, data):
        self.optimizer.add_param_group(self.drawn_group(data))

    @rule(data=st.data())
    def move_parameters(self, data):
        """New memory in another layout, as .to(memory_format=...) and p.data = ... leave it."""
        for p, _, _ in self.entries:
            if data.draw(st.booleans()):
                layout = data.draw(layouts(tuple(p.shape)))
                name = str(p.dtype).removeprefix("torch.")
                p.data = cases.to_torch(p.detach().float().numpy(), name, layout)

    @rule(how=st.sampled_from(("in process", "torch.save", "torch.optim", "deepcopy", "pickle")))
    def go_through_a_checkpoint(self, how):
        old = self.optimizer
        if how in ("deepcopy", "pickle"):
            gradients = [p.grad for p, _, _ in self.entries]
            self.optimizer = copy.deepcopy(old) if how == "deepcopy" else pickle.loads(pickle.dumps(old))
            for (p, _, _), gradient in zip(self.entries, gradients, strict=True):
                p.grad_dtype = None
                p.grad = gradient
        else:
            groups = [{**group, "params": list(group["params"])} for group in old.param_groups]
            saved = old.state_dict()
            if how == "torch.save":
                buffer = io.BytesIO()
                torch.save(saved, buffer)
                saved = torch.load(io.BytesIO(buffer.getvalue()), weights_only=True)
            elif how == "torch.optim" and all(p.dtype is torch.float32 for p, _, _ in self.entries):
                theirs = torch.optim.AdamW([{**group, "params": list(group["params"])} for group in groups])
                theirs.load_state_dict(copy.deepcopy(saved))
                saved = theirs.state_dict()
            self.optimizer = ruda_torch.AdamW(groups, **self.settings)
            self.optimizer.load_state_dict(saved)
        self.skipped = 0

    @precondition(lambda self: any(p.grad is not None for p, _, _ in self.entries))
    @rule(mistake=st.sampled_from(("lr", "beta", "sparse", "state", "scale")))
    def make_a_mistake(self, mistake):
        """A named error, and nothing changes; the invariant looks."""
        p, group, _ = next(entry for entry in self.entries if entry[0].grad is not None)
        gradient, lr, betas, state = p.grad, group["lr"], group["betas"], self.optimizer.state.get(p)
        if mistake == "lr":
            group["lr"] = math.nan
        elif mistake == "beta":
            group["betas"] = (0.9, 1.0)
        elif mistake == "sparse":
            if p.dim() == 0 or p.numel() == 0 or gradient.dtype is not torch.float32:
                return
            p.grad = gradient.to_sparse()
        elif mistake == "state":
            self.optimizer.state[p] = {"momentum_buffer": torch.zeros(1)}
        else:
            self.optimizer.grad_scale = torch.tensor(0.0)
        with pytest.raises(FusedAdamWError):
            self.optimizer.step()
        p.grad, group["lr"], group["betas"] = gradient, lr, betas
        vars(self.optimizer).pop("grad_scale", None)
        self.optimizer.state.pop(p, None)
        if state is not None:
            self.optimizer.state[p] = state

    @invariant()
    def everything_is_as_it_must_be(self):
        if not hasattr(self, "optimizer"):
            return
        for number, (p, _, twin) in enumerate(self.entries):
            state = self.optimizer.state.get(p)
            if twin.moments is None:
                assert not state
                same(f"parameter {number}", p, twin.value.to(twin.dtype))
                continue
            names = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")[: len(twin.moments)]
            for name, moment in zip(names, twin.moments, strict=True):
                same(f"{name} {number}", state[name], moment)
            assert state["step"] == twin.step
            if twin.dtype is torch.float32:
                same(f"parameter {number}", p, twin.value)
            elif self.split:
                same(f"split master {number}", joined(p, state["master_remainder"]), twin.value)
            else:
                same(f"master {number}", state["master"], twin.value)
                same(f"parameter {number}", p, twin.value.to(twin.dtype))


Runs.TestCase.settings = settings(stateful_step_count=15)
TestRuns = pytest.mark.slow(Runs.TestCase)
