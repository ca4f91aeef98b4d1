"""The training loop: steps, logging, evaluation and checkpoints, until the schedule ends."""

from __future__ import annotations

import math
import resource
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch.optim.lr_scheduler import LRScheduler

from hfpar.config.schema import SFTConfig
from hfpar.data.loader import StepLoader
from hfpar.data.stream import TokenStream
from hfpar.data.streaming import StreamLoader
from hfpar.engine.base import Engine
from hfpar.errors import ConfigError, HfparError
from hfpar.parallel.layout import Layout
from hfpar.train.checkpoint import TrainerState, last_checkpoint, load_checkpoint, save_checkpoint
from hfpar.train.progress import MetricsLogger, StepMetrics
from hfpar.train.step import StepResult, evaluate, train_step


@dataclass(frozen=True)
class Schedule:
    """How long a run is, known before it starts."""

    total_steps: int
    steps_per_epoch: int
    """Of the first epoch, or of the first window of a stream."""
    global_batch: int
    """Samples (padded) or packs (packed) an optimizer step takes."""

    @classmethod
    def of(cls, config: SFTConfig, loader: StepLoader | StreamLoader, layout: Layout) -> Schedule:
        """From `max_steps`, or else `num_train_epochs`."""
        if config.max_steps > 0:
            total = config.max_steps
        else:
            assert isinstance(loader, StepLoader)  # a stream needs max_steps
            total = loader.total_steps(config.num_train_epochs)
        steps_per_epoch = loader.num_steps(0)
        per_rank = (config.per_device_train_batch_size or 1) * (config.gradient_accumulation_steps or 1)
        return cls(total, steps_per_epoch, per_rank * layout.dp_size)


class Trainer:
    """Drives an engine through the data. Everything it works with is made elsewhere."""

    def __init__(
        self,
        *,
        config: SFTConfig,
        layout: Layout,
        engine: Engine,
        loader: StepLoader | StreamLoader,
        lr_schedule: LRScheduler,
        schedule: Schedule,
        eval_batches: Sequence[TokenStream],
        output_dir: Path,
    ) -> None:
        """Start at step 0."""
        self.config = config
        self.layout = layout
        self.engine = engine
        self.loader = loader
        self.lr_schedule = lr_schedule
        self.schedule = schedule
        self.eval_batches = eval_batches
        self.output_dir = output_dir
        self.position = TrainerState(
            step=0,
            epoch=0,
            step_in_epoch=0,
            num_tokens=0,
            num_label_tokens=0,
            global_batch=schedule.global_batch,
            engine=engine.name,
            world_size=layout.world_size,
            data=loader.fingerprint,
        )

    def resume(self) -> None:
        """With `resume`, continue from the last whole checkpoint; from the start if there is none yet."""
        if not self.config.resume:
            return
        checkpoint, skipped = last_checkpoint(self.output_dir, self.layout)
        lines = [f"resume: leaving out {line}" for line in skipped]
        if checkpoint is None:
            lines.append(f"resume: no whole checkpoint in {self.output_dir}; starting from step 0")
        else:
            self.position = load_checkpoint(
                self.engine, checkpoint, self.layout, global_batch=self.schedule.global_batch
            )
            if self.position.data not in ("", self.loader.fingerprint):
                raise ConfigError(
                    f"resume: {checkpoint} was trained on other samples; the dataset's files, the tokenizer or its "
                    "template have changed since: put them back, or start anew with another --output_dir"
                )
            self.loader.epoch, self.loader.step = self.position.epoch, self.position.step_in_epoch
            for _ in range(self.position.step):
                self.lr_schedule.step()
            lines.append(f"resume: continuing from {checkpoint} (step {self.position.step})")
        if self.layout.rank == 0:
            print("\n".join(lines), flush=True)

    def train(self, tracker: Callable[[dict[str, float], int], None] | None) -> None:
        """Take every step that is left; evaluate, log and save on the way and at the end."""
        total = self.schedule.total_steps
        with MetricsLogger(
            self.output_dir,
            is_main=self.layout.rank == 0,
            total_steps=total,
            start_step=self.position.step,
            tracker=tracker,
        ) as logger:
            if self.position.step == 0:
                self._evaluate(logger)
            window = LogWindow(self.position.num_tokens)
            while self.position.step < total:
                for micro_batches in self.loader:
                    self._step(micro_batches, logger, window)
                    if self.position.step >= total:
                        break

    def _step(self, micro_batches: list[TokenStream], logger: MetricsLogger, window: LogWindow) -> None:
        config, step = self.config, self.position.step + 1
        torch.manual_seed(hash((config.seed, step, self.layout.batch_rank)))  # dropout: same after a resume
        learning_rate = self.engine.optimizer.param_groups[0]["lr"]
        result = train_step(self.engine, micro_batches, self.layout, config.max_grad_norm or None)
        if not math.isfinite(result.loss) or math.isinf(result.grad_norm):
            self._stop_unless_fp16(step, result)
        self.lr_schedule.step()
        self.position = replace(
            self.position,
            step=step,
            epoch=self.loader.epoch,
            step_in_epoch=self.loader.step,
            num_tokens=self.position.num_tokens + result.num_tokens,
            num_label_tokens=self.position.num_label_tokens + result.num_label_tokens,
            num_steps_without_labels=self.position.num_steps_without_labels + (result.num_label_tokens == 0),
        )
        if result.num_label_tokens == 0:
            logger.message(
                f"step {step}: not one label in the global batch, so its gradients are zero "
                f"({self.position.num_steps_without_labels} such steps in this run)"
            )
        window.add(result)
        last = step == self.schedule.total_steps
        if step % config.logging_steps == 0 or last:
            logger.log_step(self._metrics(window, result.grad_norm, learning_rate))
            window.restart(self.position.num_tokens)
        else:
            logger.advance(step)
        if last or (config.eval_steps and step % config.eval_steps == 0):
            with window.paused():
                self._evaluate(logger)
        if last or (config.save_steps and step % config.save_steps == 0):
            with window.paused():
                save_checkpoint(
                    self.engine,
                    self.position,
                    self.output_dir,
                    self.layout,
                    save_total_limit=config.save_total_limit,
                )

    def _stop_unless_fp16(self, step: int, result: StepResult) -> None:
        """A step that isn't finite would spoil weights and checkpoints; fp16 alone skips such an update by itself."""
        if self.engine.settings.mixed_precision != "fp16":
            raise HfparError(
                f"step {step}: loss {result.loss}, gradient norm {result.grad_norm}: training diverged; checkpoints "
                "up to here are kept; lower learning_rate, or look at the data of this step"
            )

    def _metrics(self, window: LogWindow, grad_norm: float, learning_rate: float) -> StepMetrics:
        position = self.position
        return StepMetrics(
            step=position.step,
            epoch=position.epoch + position.step_in_epoch / self.schedule.steps_per_epoch,
            loss=window.mean_loss,
            grad_norm=grad_norm,
            learning_rate=learning_rate,
            num_tokens=position.num_tokens,
            num_label_tokens=position.num_label_tokens,
            tokens_per_second=window.tokens_per_second(position.num_tokens),
            peak_memory_bytes=peak_memory_bytes(self.engine.device),
        )

    def _evaluate(self, logger: MetricsLogger) -> None:
        if not self.eval_batches:
            return
        eval_loss, num_label_tokens = evaluate(self.engine, self.eval_batches, self.layout)
        position = self.position
        logger.log_eval(
            step=position.step,
            epoch=position.epoch + position.step_in_epoch / self.schedule.steps_per_epoch,
            eval_loss=eval_loss,
            num_eval_label_tokens=num_label_tokens,
        )


class LogWindow:
    """What has come since the last logged row."""

    def __init__(self, num_tokens: int) -> None:
        """Start with `num_tokens` seen in all."""
        self.restart(num_tokens)

    def restart(self, num_tokens: int) -> None:
        """Forget everything."""
        self.loss_sum, self.num_label_tokens = 0.0, 0
        self.start_tokens, self.start_time = num_tokens, time.perf_counter()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Around evaluating and saving: their time doesn't count as training's."""
        begin = time.perf_counter()
        yield
        self.start_time += time.perf_counter() - begin

    def add(self, result: StepResult) -> None:
        """Count one step."""
        self.loss_sum += result.loss * result.num_label_tokens
        self.num_label_tokens += result.num_label_tokens

    @property
    def mean_loss(self) -> float:
        """Over all label tokens of the window."""
        return self.loss_sum / max(self.num_label_tokens, 1)

    def tokens_per_second(self, num_tokens: int) -> float:
        """Real tokens of all ranks."""
        return (num_tokens - self.start_tokens) / (time.perf_counter() - self.start_time)


def peak_memory_bytes(device: torch.device) -> int:
    """Peak memory of the rank that needed most: allocated on the GPU, or resident on the CPU."""
    if device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(device)
    else:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    value = torch.tensor(peak, dtype=torch.int64, device=device)
    dist.all_reduce(value, op=dist.ReduceOp.MAX)
    return int(value)
