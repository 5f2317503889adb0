"""The decoding part of a job: feeds tokens back until enough are out."""

from __future__ import annotations

from functools import partial

from prfaas.runtime.job import Job
from prfaas.runtime.messages import Finished, Token
from prfaas.seams import StepResult


class TokenStream:
    """Decodes greedily from a first token, and tells the gateway every further one."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._token: int | None = None
        self._num_out = 0
        self._ready_s = 0.0
        self._wait_s: float | None = None
        self._started_s = 0.0
        self._steps_s = 0.0
        self._num_steps = 0

    def __repr__(self) -> str:
        return f"<TokenStream {self._num_out}/{self._job.work.max_new_tokens}>"

    @property
    def is_complete(self) -> bool:
        return self._num_out >= self._job.work.max_new_tokens

    def start(self, first_token: int) -> None:
        """Takes the first token, which the gateway already has."""
        self._token = first_token
        self._num_out = 1
        self._ready_s = self._job.node.clock()

    async def step(self) -> None:
        """One decode step, and the token that it makes; nothing if the job ends meanwhile."""
        job = self._job
        assert self._token is not None
        started_s = job.node.clock()
        if self._wait_s is None:
            self._wait_s = started_s - self._ready_s
            self._started_s = started_s
        result = await job.in_engine(partial(job.node.engine.decode, job.key, self._token))
        if result is None:
            return
        # From token to token, with the turns of other requests: what a step of the batch takes.
        self._steps_s = job.node.clock() - self._started_s
        self._num_steps += 1
        self._token = result.token
        self.tell(result)

    def tell(self, result: StepResult) -> None:
        """Sends the next token to the gateway."""
        work = self._job.work
        self._job.reply(
            Token(
                request_id=work.request_id,
                attempt=work.attempt,
                index=self._num_out,
                token=result.token,
                logits=result.logits if work.return_logits else b"",
            )
        )
        self._num_out += 1

    def finish(
        self,
        *,
        received_bytes: int = 0,
        expected_bytes: int = 0,
        held_tokens: int = 0,
        decode_prefilled_tokens: int = 0,
    ) -> None:
        """Tells the gateway that all tokens are out, and ends the job."""
        work = self._job.work
        self._job.reply(
            Finished(
                request_id=work.request_id,
                attempt=work.attempt,
                received_bytes=received_bytes,
                expected_bytes=expected_bytes,
                held_tokens=held_tokens,
                decode_prefilled_tokens=decode_prefilled_tokens,
                decode_wait_s=self._wait_s or 0.0,
                decode_step_s=self._steps_s / self._num_steps if self._num_steps else 0.0,
            )
        )
        self._job.release()
