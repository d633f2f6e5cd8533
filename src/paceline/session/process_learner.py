"""The learner of a training process: real gradients of a task."""

from __future__ import annotations

from torch import Tensor, nn

from paceline.endpoint import Endpoint
from paceline.op import Begun, Op
from paceline.session.backward import BucketHooks, Each
from paceline.task import Trainee
from paceline.worker.learner import TaskLearner
from paceline.worker.replica import Replica


class ProcessLearner(TaskLearner):
    """Computes this process's gradients when they are awaited, and hands out each bucket as soon as it is complete."""

    def __init__(self, trainee: Trainee, endpoint: Endpoint) -> None:
        super().__init__(trainee)
        self.endpoint = endpoint
        self._each: Each | None = None
        self._hooks = BucketHooks(trainee.flat, lambda: self._each, lambda: None)

    def gradient(self, replica: Replica, each: Each | None) -> Op[Tensor]:
        return Begun("gradient", lambda: self._gradient(replica, each))

    def _gradient(self, replica: Replica, each: Each | None) -> Tensor:
        flat = self.flat
        if self._backward(replica, each):
            if each is None:
                flat.collect_all()
                if not replica.batch.accept(flat.first_nonfinite):
                    flat.grads.zero_()
        else:
            flat.emit_zeros(each)
        return flat.grads

    def local_step(self, replica: Replica) -> Op[None]:
        return Begun("local step", lambda: self._local_step(replica))

    def _local_step(self, replica: Replica) -> None:
        if self._backward(replica, None) and replica.batch.accept(self.flat.first_nonfinite_grad):
            self.trainee.local_step()

    def evaluated(self, vector: Tensor | None) -> dict[str, float]:
        return self.trainee.evaluate(vector)

    def whole(self) -> nn.Module:
        return self.flat.model

    def _backward(self, replica: Replica, each: Each | None) -> bool:
        """Compute the next minibatch's gradient and hand its buckets to `each`; False if there is no minibatch left."""
        batch = self.trainee.draw(replica.cursor.step, replica.cursor.shard, replica.cursor.parts)
        replica.batch.begin(0 if batch is None else len(batch[0]))
        if batch is None:
            return False
        start = self.endpoint.now()
        self._each = None
        self.trainee.backward(batch, lambda: setattr(self, "_each", each))
        now = self.endpoint.now()
        self.endpoint.trace.span(replica.rank, "gradient", start, now)
        if not self.trainee.is_trial:
            self.endpoint.trace.point(now, replica.rank, replica.cursor.step, len(batch[0]), self.trainee.loss)
        return True
