"""Everything that a runner has its devices do, as a few calls whose arguments are plain values.

Where a mesh spans several processes, each of them has to make the same calls in the same order:
process 0 decides what they are and tells the others (`serving.cluster.followers`).
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Int

from jmoe.api import Model
from jmoe.family import Family
from jmoe.mixed import by_model
from jmoe.packed_rows import (
    NUM_SHAPE_COLUMNS,
    empty_rows,
    everything,
    pack_row,
    sampling_mode,
    seat_size,
)
from jmoe.parallel.steps import abstract_states, make_shapings, make_states, shardings
from jmoe.shaping import Shaping, make_shaping
from jmoe.steps import State, StepOutput, make_state
from pallas_kernels.backend import backend
from serving.config import EngineConfig
from serving.execution.buckets import Buckets, Key, sampling_phases
from serving.execution.executables import Executables
from serving.execution.programs import Programs, Progress
from serving.execution.ranks import ByRank
from serving.plan import Copies, Limits, Phase, StepControl, StepPlan, StepResult


class States(NamedTuple):
    """Makes the state of one model, or of the first of a family, or describes it for limits."""

    model: Model
    config: EngineConfig
    runs_parts: bool  # whether steps run in parts, whose rows wait between two

    def make(self, limits: Limits) -> State:
        """Makes the state, on the devices."""
        make, home = self._maker(limits), self.model.home
        return make() if home is None else make_states(home.mesh, make)

    def shaping(self, limits: Limits) -> Shaping:
        """Makes the per-slot state of requests whose logits are changed, on the devices."""
        make, home = self._shaping_maker(limits), self.model.home
        return make() if home is None else make_shapings(home.mesh, make)

    def shaping_bytes(self, limits: Limits) -> int:
        """Returns the bytes of one device's part of `shaping`."""
        shapes = jax.eval_shape(self._shaping_maker(limits))
        return sum(one.size * one.dtype.itemsize for one in shapes)

    def shapes(self, limits: Limits) -> State:
        """Returns the state's shapes, dtypes and shardings; nothing is allocated."""
        make, home = self._maker(limits), self.model.home
        return jax.eval_shape(make) if home is None else abstract_states(home.mesh, make)

    def _shaping_maker(self, limits: Limits) -> partial[Shaping]:
        return partial(make_shaping, limits.slots_per_rank, self.model.config.vocab_size)

    def _maker(self, limits: Limits) -> partial[State]:
        return partial(
            make_state,
            self.model.config,
            num_slots=limits.slots_per_rank,
            num_pages=limits.group_pages,
            page_size=limits.page_size,
            max_blocks=limits.pages_for(self.config.max_model_len),
            dtype=self.model.dtype,
            num_hidden=limits.hidden_per_rank if self.runs_parts else 0,
        )


class Device:
    """A family's programs, weights and state on the devices of this process. One thread calls at a
    time; `Led` has the same calls where there are other processes.
    """

    def __init__(
        self,
        family: Family,
        limits: Limits,
        buckets: Buckets,
        state: State,
        shaping: Shaping,
        programs: Programs,
        executables: Executables,
    ) -> None:
        """`programs` are made for such a state, and `executables` those on disk. State and shaping
        are this object's own now.
        """
        self.family, self.model = family, family[0]
        self.limits, self.buckets = limits, buckets
        self.state, self.shaping = state, shaping
        self._undrawn: tuple[StepOutput, np.ndarray] | None = None  # of the last run, and its rows
        self._executables = executables
        mesh = None if self.model.home is None else self.model.home.mesh
        self.several_processes = mesh is not None and mesh.is_multi_process
        # On a CPU the collectives of two programs under way would wait for each other for ever.
        self.one_at_a_time = self.several_processes and backend() == "cpu"
        self._split, _ = shardings(mesh)
        self.programs = programs

    @property
    def calls_block(self) -> bool:
        """Whether a call keeps its thread for long: on a GPU the host updates a graph and starts it
        meanwhile, 3 ms for 24 layers on an H100's, profiled (benchmarks/h200/LOG.md).
        """
        return backend() != "cpu"

    def compile(self, keys: Sequence[Key], progress: Progress | None = None) -> None:
        """Compiles programs, or reads them from disk."""
        self.programs.compile_all(keys, self._executables, progress)

    def compile_late(self, phase: str, size: int) -> None:
        """Compiles a phase's late size in this thread, while another makes calls."""
        keys = self.buckets.late_keys(phase, size)
        self.programs.compile_all(keys, self._executables, late=True)
        self.buckets.add_late(phase, size)

    def run(
        self,
        key: Key,
        arrays: Sequence[np.ndarray],
        *,
        models: Sequence[int] = (0,),
        score: bool = False,
        sample: bool = False,
    ) -> StepOutput:
        """Launches a step of these models, one but for a mixed step, or a part of one, and what may
        follow it: scores, tokens. Tokens that are not sampled may be drawn until the next run.
        """
        rows, self._undrawn = arrays[key.phase == "prefill"], None
        self.state, out = self.programs.run(key, self.state, *arrays, models=models)
        self._settle(out)
        if score:
            given = self.programs.beside_layers(models[0]), out.hidden, arrays[0], rows
            scores = self.programs.run_behind("score", len(arrays[0]), *given)
            out = out._replace(
                prompt_logprobs=scores.logprobs,
                prompt_top_ids=scores.top_ids,
                prompt_top_logprobs=scores.top_logprobs,
            )
            self._settle(out)
        if sample:
            return self._sample(out, rows)
        self._undrawn = out, rows
        return out

    def seat(self, rank: int, told: Int[np.ndarray, "1 n"]) -> None:
        """Seats a sequence in a slot of a rank; `told` is made by `jmoe.packed_rows.pack_seat`."""
        by_rank = np.full((self.limits.num_ranks, told.shape[1]), -1, np.int32)  # -1: no slot
        by_rank[rank] = told
        self.shaping = self.programs.seat(self.shaping, by_rank)

    def draw(
        self,
        shapes: Int[np.ndarray, "B shape"],
        limited: Int[np.ndarray, "n"],
        allowed: Int[np.ndarray, "n W"],
    ) -> StepOutput:
        """Draws the tokens of the last run. `shapes` are of all its rows, padding included; rows
        that are `limited` draw tokens that are `allowed`, others any. Raises ValueError where they
        are drawn already.
        """
        if self._undrawn is None:
            raise ValueError("no step waits to be drawn")
        (out, rows), self._undrawn = self._undrawn, None
        every = np.full((len(shapes), allowed.shape[1]), -1, np.int32)
        every[limited] = allowed
        return self._draw(out, rows, shapes, every)

    def _sample(self, out: StepOutput, rows: Int[np.ndarray, "B C"]) -> StepOutput:
        """Samples a step's tokens where its rows want that."""
        mode = sampling_mode(rows)
        if mode == "greedy":
            return out
        if mode not in sampling_phases():
            shapes = np.zeros((len(rows), NUM_SHAPE_COLUMNS), np.int32)
            allowed = everything(len(rows), self.model.config.vocab_size)
            drawn = self._draw(out, rows, shapes, allowed)
            return drawn._replace(top_ids=None, top_logprobs=None)
        given = self.state.last_token, out.logits, rows
        last_token, tokens, logprobs = self.programs.run_behind(mode, len(rows), *given)
        self.state = self.state._replace(last_token=last_token)
        return self._settle(out._replace(tokens=tokens, logprobs=logprobs))

    def _draw(
        self,
        out: StepOutput,
        rows: Int[np.ndarray, "B C"],
        shapes: Int[np.ndarray, "B shape"],
        allowed: Int[np.ndarray, "B W"],
    ) -> StepOutput:
        """Draws the tokens of a step in which rows are shaped."""
        given = self.state.last_token, self.shaping, out.logits, rows, shapes, allowed
        last_token, self.shaping, drawn = self.programs.run_behind("draw", len(rows), *given)
        self.state = self.state._replace(last_token=last_token)
        return self._settle(out._replace(**drawn._asdict()))

    def arrays(self, key: Key, step: ByRank, control: StepControl) -> list[np.ndarray]:
        """Returns a program's arguments behind the state, padded to its size on each rank."""
        of_program = self.buckets.rows(key), self.buckets.deltas(key), key.size
        tokens, rows, deltas, places = step.arrays(*of_program)
        layers = step.plan.first_layer, step.plan.stop_layer
        arrays = [rows, deltas, np.array([*control[:2], *layers], np.int32)]
        if key.phase == "prefill":
            arrays.insert(0, tokens)
            if self.state.hidden is not None:
                arrays.append(places)
        return arrays

    def read(self, out: StepOutput, key: Key, step: ByRank) -> Callable[[], StepResult]:
        """Starts the copies of what the host reads of a step; returns a function that waits for
        them, in the step's own order and without padding.
        """
        out = out._replace(logits=None, hidden=None)
        if backend() != "cpu":  # where the host reads the device's own memory
            for leaf in jax.tree.leaves(out):
                leaf.copy_to_host_async()
        row_at, token_at = step.row_at(self.buckets.rows(key)), step.token_at(key.size)
        num_ranks, plan = self.limits.num_ranks, step.plan

        def read() -> StepResult:
            read = jax.tree.map(np.asarray, out)  # `device_get` takes ten times as long on a CPU
            none = [0] * len(row_at)
            by_rank = read.expert_rows.reshape(num_ranks, -1, read.expert_rows.shape[-1])
            rows, rows_by_model = self._of_all(by_rank.sum(0), plan.first_layer), None
            if key.models > 1:
                rows_by_model = by_model(rows, key.models, self.model.config.num_experts)
                rows = rows_by_model.sum(0, dtype=rows.dtype)
            if (own := self.model.config.strategy) is not None:
                own.check(read.wrong)
            copies = None
            if read.balance is not None:  # every rank says the same
                ranks = (part.reshape(num_ranks, -1)[0] for part in read.balance)
                copies = Copies(*(self._of_all(part, plan.first_layer) for part in ranks))
            return StepResult(
                none if read.tokens is None else read.tokens[row_at].tolist(),
                none if read.logprobs is None else read.logprobs[row_at].tolist(),
                read.degraded[row_at].tolist(),
                rows,
                None if read.prompt_logprobs is None else read.prompt_logprobs[token_at],
                self._of_all(by_rank.sum(-1).T, plan.first_layer) if num_ranks > 1 else None,
                copies,
                None if read.needed is None else self._of_all(read.needed, plan.first_layer),
                1 - plan.size / (step.num_ranks * key.size),
                None if read.top_ids is None else read.top_ids[row_at],
                None if read.top_logprobs is None else read.top_logprobs[row_at],
                prompt_top=None
                if read.prompt_top_ids is None
                else (read.prompt_top_ids[token_at], read.prompt_top_logprobs[token_at]),
                rows_by_model=rows_by_model,
            )

        return read

    def _of_all(self, found: np.ndarray, first_layer: int) -> np.ndarray:
        """Returns a value for all MoE layers, though a part of a step has only its own."""
        moe_layers = self.model.config.moe_layers
        count = sum(moe_layers)
        if len(found) == count:
            return found
        every = np.zeros((count, *found.shape[1:]), found.dtype)
        before = sum(moe_layers[:first_layer])
        every[before : before + len(found)] = found
        return every

    def warm(self, key: Key) -> None:
        """Runs a program on padding, and waits for it."""
        num_ranks, cfg = self.limits.num_ranks, self.model.config
        rows = empty_rows(num_ranks * self.buckets.rows(key))
        nothing = StepOutput(*jnp.zeros((4, 1), jnp.int32))
        if key.phase == "seat":
            self.seat(0, np.full((1, seat_size(key.size)), -1, np.int32))
            out = self.shaping
        elif key.phase in ("sample", "truncate", "draw"):
            logits = jnp.zeros((len(rows), cfg.vocab_size), jnp.float32, device=self._split)
            rows[:] = pack_row(-1, kv_len=0, temperature=1.0, top_k=int(key.phase == "truncate"))
            out = nothing._replace(logits=logits)
            if key.phase == "draw":
                shapes = np.zeros((len(rows), NUM_SHAPE_COLUMNS), np.int32)
                out = self._draw(out, rows, shapes, everything(len(rows), cfg.vocab_size))
            else:
                out = self._sample(out, rows)
        elif key.phase == "score":
            shape = num_ranks * key.size, cfg.d_model
            hidden = jnp.zeros(shape, self.model.dtype, device=self._split)
            tokens = np.zeros(num_ranks * key.size, np.int32)
            given = self.programs.beside_layers(0), hidden, tokens, rows
            out = self.programs.run_behind("score", len(tokens), *given)
        else:
            control = StepControl(key.bucket_percent, 0)
            phase, stop = Phase(key.phase), self.limits.num_layers
            padding = ByRank.of(StepPlan(phase, empty_rows(0), stop_layer=stop), self.limits)
            if key.models > 1:
                padding = padding._replace(num_ranks=num_ranks * key.models)
            arrays = self.arrays(key, padding, control)
            out = self.run(key, arrays, models=self.programs.resident[: key.models])
        jax.block_until_ready(out)

    def use_way(self, way: int) -> None:
        """Loads the united experts of a way into every layer."""
        for model in self.family:
            model.use_way(way)

    def load_way(self, way: int, layer: int) -> None:
        """Loads a way into one MoE layer, counted through the models of a family."""
        model, own = divmod(layer, self.model.config.num_moe_layers)
        self.family[model].load_way_layer(way, own)

    def host_layer(self, layer: int, hosts: Bool[np.ndarray, "E D"]) -> None:
        """Copies one MoE layer's experts to other hosts."""
        self.family.host_layer(layer, hosts)

    def ready(self) -> None:
        """Waits for what was launched; from here on every compilation counts as a fault, and
        processes of one mesh look after each other by themselves.

        jax's own service, which ends a process without a word when another one is gone, is needed
        for as long as programs are compiled and meet each other for the first time.
        """
        jax.block_until_ready((self.state, self.shaping, self.model.pool))
        self.programs.compilations.ready()
        if self.several_processes:
            jax.distributed.shutdown()

    def _settle(self, out: StepOutput) -> StepOutput:
        """Waits for what was launched where steps run one at a time; returns `out`."""
        if self.one_at_a_time:
            jax.block_until_ready((self.state, out))
        return out
