"""Steps as a scheduler makes them, for tests of what is decided by a step."""

from serving.plan import Limits, Phase
from serving.request import Priority, Request, SamplingParams
from serving.scheduling.policy import Fcfs
from serving.scheduling.scheduler import Scheduler
from serving.scheduling.sequence import SequenceState
from serving.scheduling.step import ScheduledStep

LIMITS = Limits(256, 1024, 16, 512, 256)
LS = Priority.LATENCY_SENSITIVE


def sequence_of(
    prompt, max_new=100, *, name="", allow_brownout=True, priority=LS, arrived_at=0.0, model=0
):
    """Returns a request's sequence as the engine admits it."""
    sampling = SamplingParams(max_new_tokens=max_new)
    return SequenceState(
        Request(name, prompt, sampling, allow_brownout, priority, model=model),
        list(prompt),
        seed=0,
        arrived_at=arrived_at,
        stop_token_ids=frozenset(),
        tokenizer=None,
    )


def prefill_step(num_tokens: int, num_exempt: int = 0, priority: Priority = LS) -> ScheduledStep:
    """Returns a prefill step of prompts of one token each, some of which refuse brownout."""
    return _steps(num_tokens, num_exempt, priority)[0]


def decode_step(num_rows: int, num_exempt: int = 0, priority: Priority = LS) -> ScheduledStep:
    """Returns a decode step that follows such a prefill step."""
    return _steps(num_rows, num_exempt, priority)[1]


def _steps(count: int, num_exempt: int, priority: Priority) -> list[ScheduledStep]:
    scheduler = Scheduler(LIMITS, Fcfs())
    for number in range(count):
        allows = number >= num_exempt
        sequence = sequence_of([1], name=str(number), allow_brownout=allows, priority=priority)
        scheduler.add(sequence)
    steps = []
    for phase in Phase:
        step = scheduler.next_step()
        assert step is not None
        assert step.phase is phase
        assert len(step.sequences) == count
        steps.append(step)
    return steps
