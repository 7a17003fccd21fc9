"""Does the suite find a fault in the engine? Plants one after the other and runs the tests that should fail.

Each fault is one replacement in a copy of the package; the working tree is not touched. A fault that no test finds
survives, and makes this script fail: either a test is missing, or the line does nothing.

    python tests/mutants.py [--jobs 2] [--timeout 300] [--list] [name ...]
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "src" / "recollect"


@dataclass(frozen=True)
class Fault:
    """A careless change. `old` occurs once in `file`, so that a refactoring that moves it away is noticed."""

    name: str
    file: str  # relative to the package
    old: str
    new: str
    tests: tuple[str, ...]  # files in tests/, or single tests of them where the file is slow


def fault(name: str, file: str, old: str, new: str, *tests: str) -> Fault:
    return Fault(name, file, old, new, tests)


FAULTS = (
    # --- Chains ---
    fault(
        "random generators are not put back where a kept state had them",
        "_chains/kept.py",
        "        if self._access is not None:\n            self._access[1](random)\n",
        "",
        "test_chains.py",
    ),
    fault(
        "what steps change outside is not kept with states",
        "_chains/kept.py",
        "        if values:\n            overwrite(",
        "        if values and False:\n            overwrite(",
        "test_chains_outside.py",
    ),
    fault(
        "kept states that were changed in place are used",
        "_chains/later.py",
        "                if kept.is_changed():\n",
        "                if False:\n",
        "test_chains_outside.py",
    ),
    fault(
        "sums over steps are formed step by step",
        "_chains/later.py",
        "        if summed:\n            self._put_first(tensors, grads, summed, of)\n",
        "        before = {index: outside[index] for index in summed}\n",
        "test_chains.py",
    ),
    fault(
        "large gradients are summed up beside themselves",
        "_chains/later.py",
        "        ctx.so_far.clear()\n",
        "",
        "test_chains.py",
    ),
    fault(
        "hooks on weights see every step",
        "_chains/node.py",
        "            hooks.clear()\n",
        "",
        "test_chains.py",
    ),
    fault(
        "hooks on weights are lost",
        "_chains/node.py",
        "            undo.append(partial(hooks.update, dict(hooks)))\n",
        "",
        "test_chains.py",
    ),
    fault(
        "a leaf that no first run has come by gets no gradient",
        "_chains/later.py",
        "                                self._strangers.append(weakref.ref(leaf))\n",
        "                                pass\n",
        "test_chains_outside.py",
    ),
    fault(
        "a leaf that is no parameter gets no gradient",
        "_chains/first.py",
        "            leaf = reference()\n            if leaf is not None:\n                self._found(leaf)\n",
        "            pass\n",
        "test_chains_outside.py",
    ),
    fault(
        "a weight behind a tensor from outside is counted twice",
        "_chains/cuts.py",
        "                if id(node.variable) in asked_for:\n                    return True\n",
        "                pass\n",
        "test_chains_outside.py",
    ),
    fault(
        "tensors that a function has are not waited for",
        "_chains/first.py",
        "is_new = self._unread.get(id(function)) or self._unseen.get(id(function))",
        "is_new = self._unseen.get(id(function))",
        "test_chains_outside.py",
    ),
    fault(
        "nothing needs grad, so nothing is looked at",
        "_chains/first.py",
        " or not any(self.needs):\n",
        ":\n",
        "test_chains_outside.py",
    ),
    fault(
        "weights that were cast without a graph are used with one",
        "_chains/chain.py",
        "            clear_autocast_cache()\n",
        "            pass\n",
        "test_chains_outside.py",
    ),
    fault(
        "results hold what is kept, and are held by it",
        "_chains/node.py",
        "        values.append(tensor.detach())\n",
        "        values.append(tensor)\n",
        "test_chains.py",
    ),
    fault(
        "a chain is not let go of after its backward",
        "_chains/node.py",
        "    if not graph_is_kept():\n        chain.release()\n",
        "",
        "test_chains_outside.py",
    ),
    fault(
        "what happens once happens again when a step is run again",
        "_chains/notes.py",
        "        if self.is_again:\n            return self._hand_out",
        "        if False:\n            return self._hand_out",
        "test_chains_outside.py",
    ),
    fault(
        "a change of the structure goes unnoticed",
        "_chains/structure.py",
        "        if type(value) is not self._kind or len(value) != len(self._parts):\n",
        "        if len(value) != len(self._parts):\n",
        "test_chains_input.py",
    ),
    fault(
        "values of states are not compared",
        "_chains/later.py",
        "                if apart:\n",
        "                if False:\n",
        "test_chains_outside.py",
    ),
    fault(
        "groups of steps are differentiated in the order of their forwards",
        "_chains/choice.py",
        "            for step in reversed(range(action.step * size, min((action.step + 1) * size, length))):\n",
        "            for step in range(action.step * size, min((action.step + 1) * size, length)):\n",
        "test_chains_loops.py",
    ),
    # --- Schedules ---
    fault(
        "a state is kept where its step is the only one",
        "_schedules/revolve.py",
        "            kept = stop - start > 1  # a single step is differentiated from the running state\n",
        "            kept = True\n",
        "test_schedules_revolve.py",
    ),
    fault(
        "the simulator lets one slot too many pass",
        "_schedules/simulator.py",
        "        if limit is not None and len(holders) >= limit:\n",
        "        if limit is not None and len(holders) > limit:\n",
        "test_schedules.py",
    ),
    fault(
        "a state that a graph made is counted twice",
        "_schedules/simulator.py",
        "            self._running.in_graph = True\n            return\n",
        "            return\n",
        "test_schedules.py",
        "test_schedules_rotor.py",
    ),
    fault(
        "the sweep to a cut may take any memory",
        "_schedules/rotor.py",
        "            max(sweep, chain.output_bytes[step] + self.least[step + 1][t], own_least[step])\n",
        "            max(chain.output_bytes[step] + self.least[step + 1][t], own_least[step])\n",
        "test_schedules_rotor.py",
    ),
    fault(
        "amounts in between are rounded upwards",
        "_schedules/rotor.py",
        "            here if need + held <= amount else below\n",
        "            here\n",
        "test_schedules_rotor.py",
    ),
    fault(
        "bends downwards are not noticed",
        "_schedules/hrevolve.py",
        "                self.is_convex = False\n",
        "                pass\n",
        "test_schedules_hrevolve.py",
    ),
    fault(
        "states that have to stay are dropped",
        "_schedules/online.py",
        "            if not stays and after - kept[i - 1] <= self._longest[i - 1]:\n",
        "            if after - kept[i - 1] <= self._longest[i - 1]:\n",
        "test_schedules_online.py",
    ),
    # --- Parameters that are sharded between ranks ---
    fault(
        "a step on shards is not seen where they are gathered",
        "_optimizers.py",
        "                for gathered in changed_by_step(parameter):\n                    _note(gathered, number)\n",
        "",
        "test_fsdp_guards.py",
    ),
    fault(
        "a step counts for weights that are held",
        "_shards.py",
        "known[1] is not None and known[1].is_away()",
        "known[1] is not None",
        "test_fsdp_guards.py",
    ),
    fault(
        "shards are not watched",
        "_guards.py",
        "        return versions_of(shards) != self._versions or any",
        "        return any",
        "test_fsdp_frozen.py",
    ),
    fault(
        "other shards are not noticed",
        "_guards.py",
        " or any(map(is_not, shards, (one() for one in self._shards)))",
        "",
        "test_fsdp_guards.py",
    ),
    fault(
        "a weight that is gathered for the first time counts as made inside",
        "_record.py",
        "            if key in self._made and not is_gathered(owner):\n",
        "            if key in self._made:\n",
        "test_fsdp_frozen.py",
    ),
    fault(
        "what is done to gather weights counts as the function's own",
        "_record.py",
        "        if process_groups and is_work_of_fsdp(sys._getframe().f_back):\n",
        "        if False:\n",
        "test_fsdp_frozen.py",
    ),
    fault(
        "weights that were let go of after a backward count as held",
        "_guards.py",
        " or (was_replayed and source.goes_away_after_backward())",
        "",
        "test_fsdp_frozen.py",
    ),
    fault(
        "a shard in the place of what was gathered from it counts as another weight",
        "_guards.py",
        " or (now is not None and are_one(then, now)):\n",
        ":\n",
        "test_fsdp.py",
    ),
    fault(
        "a nesting that gathers twice is not told",
        "_known.py",
        "        self.gathers_are_known = not process_groups",
        "        self.gathers_are_known = True",
        "test_fsdp1.py",
    ),
    fault(
        "a nesting that gathers once is told too",
        "_torch.py",
        """    return lets_go and handle._training_state.name != "BACKWARD_PRE"\n""",
        "    return lets_go\n",
        "test_fsdp1.py",
    ),
    fault(
        "gathered weights count as activations of a block",
        "_calls.py",
        " or isinstance(tensor if tensor._base is None else tensor._base, Parameter):\n",
        ":\n",
        "test_ranks.py",
    ),
    fault(
        "what was gathered counts after it was let go of",
        "_meters.py",
        "            elif (more := storage.nbytes() - self._sizes.get(key, 0)) and key in self._sizes:\n",
        "            elif (more := storage.nbytes() - self._sizes.get(key, 0)) > 0 and key in self._sizes:\n",
        "test_ranks.py",
    ),
    fault(
        "a part of what is sharded is run without its weights",
        "_alone.py",
        "        for unit in self._around:\n            unit.unshard()\n",
        "        pass\n",
        "test_ranks.py",
    ),
    fault(
        "ranks with different models plan together",
        "_ranks.py",
        "    others = [rank for rank, one in enumerate(everybody) if one != everybody[0]]\n",
        "    others: list[int] = []\n",
        "test_ranks.py",
    ),
    # --- Plans ---
    fault(
        "looking at a block leaves its graph behind",
        "_candidates.py",
        "        # Nobody asks for it; an output that its own node held would stay for good.\n",
        "        return tensor\n",
        "test_plan.py::test_plans_leave_no_memory_behind",
    ),
    fault(
        "a plan that does not fit is handed out",
        "_trial.py",
        "            if ran.step.peak <= limit:\n",
        "            if ran.step.peak <= limit * 2:\n",
        "test_plan.py::test_predictions_that_are_wrong_are_corrected",
    ),
    fault(
        "the first blocks are offloaded though that is slow",
        "_trial.py",
        "            found += self._begun_later(found[-1], limit)  # the one that offloads, if there is one\n",
        "            pass\n",
        "test_plan.py::test_offloading_begins_later_where_a_step_that_begins_with_it_is_slow",
    ),
    fault(
        "each rank believes its own link",
        "profile.py",
        "    out, back = worst([-speed for speed in speeds])\n",
        "    out, back = (-speed for speed in speeds)\n",
        "test_ranks.py::test_the_slowest_link_counts_and_one_rank_decides",
    ),
    fault(
        "each rank decides whether anything fits",
        "_trial.py",
        "            solution = same(_solved(problem, limit - correction))\n",
        "            solution = _solved(problem, limit - correction)\n",
        "test_ranks.py::test_the_slowest_link_counts_and_one_rank_decides",
    ),
    fault(
        "the least budget leaves nothing free where something is offloaded",
        "_trial.py",
        "        return math.ceil(peak / (1 - _VARIES)) if offloads else peak\n",
        "        return peak\n",
        "test_plan.py::test_the_least_budget_holds_where_something_is_offloaded",
    ),
    fault(
        "a plan is run again that was run before",
        "_trial.py",
        "        if solution.chosen not in self._ran:\n",
        "        if True:\n",
        "test_plan.py::test_offloading_begins_later_where_a_step_that_begins_with_it_is_slow",
    ),
    fault(
        "noise may say that a backward takes no time",
        "_alone.py",
        "        max(whole_seconds - forward_seconds, whole_seconds * _LEAST_OF_STEP),\n",
        "        max(whole_seconds - forward_seconds, 0.0),\n",
        "test_plan.py::test_a_backward_takes_some_time_whatever_the_noise",
    ),
    fault(
        "replays that are not seen take no time",
        "_replays.py",
        " / 1000 if spans else None\n",
        " / 1000\n",
        "test_replays.py::test_replays_that_are_not_seen_cannot_be_told",
    ),
    fault(
        "a call that failed before it began ends another one",
        "_replays.py",
        "        if not any(one is module for one, _ in begun):  # ",
        "        if not begun:  # ",
        "test_replays.py::test_a_call_that_fails_before_it_begins_takes_no_time",
    ),
    fault(
        "nobody times the replays of a block",
        "_alone.py",
        "                    replayed[number].append(replay_seconds(bench.device, again, alone.train))\n",
        "                    alone.train()\n",
        "test_replays.py::test_a_block_is_priced_by_its_replays_where_its_runs_vary",
    ),
    fault(
        "the runs of a forward are timed as replays",
        "_replays.py",
        ", in_replays=True)",
        ")",
        "test_replays.py",
    ),
    fault(
        "what takes less time than noise counts as it comes out",
        "_alone.py",
        "    if known and abs(difference - statistics.median(known)) <= noise:\n",
        "    if False:\n",
        "test_replays.py::test_a_way_adds_its_replays_unless_it_makes_another_difference",
    ),
    fault(
        "a replay within another one is timed twice",
        "_replays.py",
        "        if not begun:  # else it is within another one\n",
        "        if True:\n",
        "test_replays.py::test_a_replay_within_another_counts_once",
    ),
    fault(
        "that nothing fits is believed before it was run",
        "_trial.py",
        "                if best is not None or first or self._profile.is_estimated:\n",
        "                if True:\n",
        "test_plan.py::test_predictions_that_are_wrong_are_corrected",
    ),
    fault(
        "choices that are tried again are not compared by value again",
        "_tried.py",
        '        with decided(bench.model, decisions, "values"):\n',
        "        with decided(bench.model, decisions):\n",
        "test_plan_steps.py::test_only_what_fails_is_ruled_out",
    ),
    fault(
        "a step that fails on its own is blamed on choices",
        "_trial.py",
        "        with decided(bench.model, self._decisions(now)):\n            bench.train()\n",
        "",
        "test_plan_steps.py::test_a_step_that_fails_is_not_blamed_on_choices",
    ),
    fault(
        "a step may change its batch",
        "_writes.py",
        "        if memory in self._batch:\n",
        "        if False:\n",
        "test_plan_steps.py::test_a_step_that_changes_its_batch_is_refused_before_it_does",
    ),
    fault(
        "a step may change parameters",
        "_writes.py",
        "        if next(modules_being_called(sys._getframe(1)), None) is None:\n",
        "        if False:\n",
        "test_plan_steps.py::test_a_step_that_does_more_than_to_give_a_loss_is_refused_before_it_does",
    ),
    fault(
        "parameters that modules change are not put back",
        "_bench.py",
        "            self._writes.put_back()\n",
        "",
        "test_plan_steps.py::test_what_modules_change_in_their_own_parameters_is_put_back",
    ),
    fault(
        "what modules remember is not put back",
        "_aside.py",
        "                _refill(container, before)\n",
        "                pass\n",
        "test_plan_steps.py::test_what_modules_remember_is_put_back",
    ),
    fault(
        "a gradient comes back as another tensor",
        "_aside.py",
        "            self._grad.data = self._values.to(self._device)\n",
        "            self._grad = self._values.to(self._device)\n",
        "test_plan_steps.py::test_a_gradient_waits_on_the_host_and_comes_back_as_the_same_tensor",
    ),
    fault(
        "parts that blocks share are decided for one of them",
        "_alone.py",
        "        look.parts = {name: what for name, what in look.parts.items() if name not in shared}\n",
        "",
        "test_plan_steps.py::test_what_blocks_share_is_not_decided_for_one_of_them",
    ),
    fault(
        "gradients are not put back after a plan was made",
        "_aside.py",
        "        self._leaf.grad = self._grad\n",
        "",
        "test_plan.py::test_a_model_is_left_as_it_was",
    ),
    fault(
        "what blocks hold is not counted where others run",
        "profile.py",
        "                backward[number] = mark.peak - held[number] - chosen[number].backward\n",
        "                backward[number] = mark.peak - chosen[number].backward\n",
        "test_plan.py::test_what_is_predicted_for_every_way_to_treat_the_blocks_is_what_comes_out",
    ),
    fault(
        "a step that is over holds memory until the next one",
        "_stores/store.py",
        "                self._flights.land_all()\n            if self._step is None:",
        "                self._flights.land_what_has_left()\n            if self._step is None:",
        "test_offload.py::test_a_step_that_is_over_holds_no_memory_however_far_ahead_the_host_is",
    ),
    fault(
        "calls of an operator that are not kept are not counted",
        "_engine/selective.py",
        "is_counted = table is None or isinstance(found, ByCall)",
        "is_counted = table is None",
        "test_calls.py",
    ),
    # --- Ranks that fail ---
    fault(
        "a pass counts as over before the callbacks of others",
        "_faults.py",
        "            at_end_of_pass(partial(_succeeded, self._task))  # after",
        "            _succeeded(self._task)  # after",
        "test_rank_faults.py::test_what_fails_at_the_end_of_the_pass",
    ),
    fault(
        "a name keeps what a function is bound to",
        "_faults.py",
        "    return function.__code__ if type(function) is FunctionType else function\n",
        "    return function\n",
        "test_rank_faults.py::test_a_name_keeps_nothing_alive",
    ),
    fault(
        "a rank that fails for the lack of a peer leaves word too",
        "_faults.py",
        "            if not found or not may_follow:\n",
        "            if True:\n",
        "test_rank_faults.py",
    ),
    fault(
        "the trace goes on after the error has arrived",
        "_faults.py",
        "        sys.settrace(None)\n",
        "",
        "test_rank_faults.py::test_an_error_elsewhere_in_backward_names_the_region_that_was_replayed_last",
    ),
    fault(
        "an error is noted again by every region that it passes",
        "_faults.py",
        "    if not any(str(note).startswith(_errors.RANK_NOTE) for note in notes):\n",
        "    if True:\n",
        "test_rank_faults.py",
    ),
    fault(
        "a store that does not answer is waited for",
        "_faults.py",
        "        talk.join(_PATIENCE)\n",
        "        talk.join()\n",
        "test_rank_faults.py::test_a_store_that_does_not_answer_is_not_waited_for",
    ),
    # --- Slots, and which tensor goes where ---
    fault(
        "neighbouring slots are swapped",
        "_engine/frame.py",
        "\n        tensor = tensors[index]\n",
        "\n        tensor = tensors[index ^ 1 if index ^ 1 < len(tensors) else index]\n",
        "test_remat.py",
    ),
    fault(
        "a slot that has died counts as alive",
        "_engine/replay.py",
        'next(map(getrefcount, [FIRST_SLOT + len("a")])).__lt__',
        'next(map(getrefcount, [FIRST_SLOT + len("a")])).__le__',
        "test_rules.py",
    ),
    fault(
        "a recovered tensor keeps the graph of the replay",
        "_engine/replay.py",
        "        kept = tensor.detach() if tensor.requires_grad else tensor\n",
        "        kept = tensor\n",
        "test_rules.py",
    ),
    fault(
        "a tensor that was handed over stays in the replay",
        "_engine/frame.py",
        "        tensors[index] = None\n",
        "",
        "test_rules.py",
    ),
    # --- The stop ---
    fault(
        "the stop comes one tensor too early",
        "_engine/replay.py",
        "            if index < last:\n",
        "            if index < last - 1:\n",
        "test_rules.py",
    ),
    fault(
        "a replay never stops",
        "_engine/replay.py",
        "stops_early = frame.options.early_stop or only is not None or not frame.finished",
        "stops_early = only is not None or not frame.finished",
        "test_options.py",
    ),
    fault(
        "the stop does not wait for noise that is yet to be written",
        "_engine/replay.py",
        "return not packs_what_is_written(current_node(), self.slots[index])",
        "return False",
        "test_early_stop.py::test_gradients_equal_plain_autograd",
    ),
    fault(
        "the stop waits where everything is written",
        "_engine/replay.py",
        "return not packs_what_is_written(current_node(), self.slots[index])",
        "return True",
        "test_early_stop.py::test_a_frozen_neighbour_is_no_reason_to_run_the_last_kernel",
    ),
    fault(
        "the stop waits on while an inner region begins",
        "_engine/replay.py",
        "        runs_on = self.operator == sequence_number() and not by_hand.packing\n",
        "        runs_on = self.operator == sequence_number()\n",
        "test_early_stop.py::test_an_inner_region_after_the_operator_is_not_run_again",
    ),
    fault(
        "an interrupt is lost while the stop unwinds",
        "_engine/replay.py",
        "if replay.state != _COMPLETE or not isinstance(error, (Stop, Exception)):",
        "if replay.state != _COMPLETE:",
        "test_faults.py::test_an_interrupt_while_the_stop_unwinds_is_not_lost",
    ),
    fault(
        "the stop leaves out always_call hooks",
        "_engine/replay.py",
        "                run_cut_short_hooks(replay.stop.__traceback__)\n",
        "                pass\n",
        "test_rules.py",
    ),
    fault(
        "the stop holds the exception in whose handler it was raised",
        "_engine/replay.py",
        "replay.stop.__traceback__ = replay.stop.__context__ = None",
        "replay.stop.__traceback__ = None",
        "test_rules.py::test_rule_7_the_stop_within_the_handler_of_an_exception_leaves_nothing",
    ),
    # --- Passes ---
    fault(
        "what is saved after the last needed tensor is taken for another leaf",
        "_engine/replay.py",
        "        if index <= self.last:  # what comes later",
        "        if True:  # what comes later",
        "test_guards.py",
    ),
    fault(
        "the replay of another pass is served",
        "_engine/frame.py",
        "        known = replay_of(graph_task_id())\n",
        "        known = next(iter(replays.values()), None)\n",
        "test_rules.py",
    ),
    fault(
        "a Function may read what it saved twice",
        "_engine/frame.py",
        "        elif reads_once(current_node()):\n",
        "        else:\n",
        "test_rules.py::test_rule_4_reading_saved_tensors_twice_is_an_error",
    ),
    fault(
        "what a pass left behind is not dropped",
        "_engine/frame.py",
        "                at_end_of_pass(replay)  # which holds it until then\n",
        "                self.held = replay\n",
        "test_rules.py",
    ),
    fault(
        "groups are ignored",
        "_engine/frame.py",
        "            group = current_group()\n",
        "            group = None\n",
        "test_groups.py",
    ),
    fault(
        "the group around a backward reaches into the replay",
        "_engine/replay.py",
        "        set_current_group(None)\n",
        "",
        "test_groups.py",
    ),
    fault(
        "calls of a group may overlap",
        "_engine/groups.py",
        "        if not given.isdisjoint(now):\n",
        "        if False:\n",
        "test_groups.py",
    ),
    fault(
        "a group holds what no gradient needs any more",
        "_engine/groups.py",
        "        if given >= every:\n",
        "        if False:\n",
        "test_groups.py",
    ),
    # --- Ranks ---
    fault(
        "what torch.distributed keeps is not put back",
        "_meshes.py",
        "        if now == self._seen:\n",
        "        if True:\n",
        "test_tensor_parallel.py",
    ),
    fault(
        "a graph holds process groups",
        "_torch.py",
        "        return None if group is None else weakref.ref(group)\n\n    def put_default_group",
        "        return None if group is None else (lambda: group)\n\n    def put_default_group",
        "test_tensor_parallel.py",
    ),
    fault(
        "nothing is gathered ahead of its replay",
        "_gathering.py",
        "            before._begin_all(task)\n",
        "            pass\n",
        "test_shard.py",
    ),
    fault(
        "regions are gathered that a pass does not come to",
        "_gathering.py",
        " and before._begun_for != task and will_run(node):\n",
        " and before._begun_for != task:\n",
        "test_shard.py",
    ),
    fault(
        "it is not seen that inputs differ between ranks",
        "_gathering.py",
        "        if compares:\n",
        "        if False:\n",
        "test_shard.py",
    ),
    fault(
        "an input that several regions take is kept several times",
        "_gathering.py",
        "    known = _parts.get(key)\n",
        "    known = None\n",
        "test_shard.py",
    ),
    fault(
        "a part that is kept is taken for that of other values",
        "_gathering.py",
        " and torch.equal(kept.values, part.values):\n",
        ":\n",
        "test_shard.py",
    ),
    fault(
        "parts are put together in another order of memory",
        "_gathering.py",
        "        return permuted.reshape(-1), stride\n",
        "        return tensor.reshape(-1), stride\n",
        "test_shard.py",
    ),
    # --- Exceptions ---
    fault(
        "hooks are not popped on an exception",
        "_engine/frame.py",
        "    take_off(scope.pack)\n",
        "    if succeeded:\n        take_off(scope.pack)\n",
        "test_faults.py",
    ),
    fault(
        "the scope is not left on an exception",
        "_engine/frame.py",
        "    here.scope = outer\n",
        "    here.scope = outer if succeeded else scope\n",
        "test_easily_broken.py",
    ),
    fault(
        "after a step of the undoing that fails the others are left out",
        "_ambient.py",
        "            steps.pop()\n            undo_all(steps)\n            raise\n",
        "            raise\n",
        "test_easily_broken.py",
    ),
    # --- What is compared ---
    fault(
        "the versions of inputs are not compared",
        "_inputs.py",
        "            if self._read(self._originals) != self._versions:\n",
        "            if False:\n",
        "test_rules.py",
    ),
    fault(
        "the versions of the inputs of inner regions are not compared",
        "_inputs.py",
        "change = _find_change(arguments, [reference() for reference in self._originals], self._versions)",
        "change = None",
        "test_rules.py",
    ),
    fault(
        "an input that the region changes itself is not noticed",
        "_inputs.py",
        "        if self._read(tensors) != self._versions:\n",
        "        if False:\n",
        "test_rules.py",
    ),
    fault(
        "a container among the arguments is not rebuilt",
        "_inputs.py",
        "        if not flat or hooks is not None:\n",
        "        if hooks is not None:\n",
        "test_rules.py",
    ),
    fault(
        "the versions of saved tensors are not compared",
        "_engine/frame.py",
        "if version and version != replay.versions.get(index, 0) and version",
        "if False and version",
        "test_rules.py",
    ),
    fault(
        "a replay may save fewer tensors",
        "_engine/replay.py",
        "    fewer = ended and (count <= replay.last or (finished and count < known))\n",
        "    fewer = False\n",
        "test_rules.py",
    ),
    fault(
        "a replay may save more tensors",
        "_engine/replay.py",
        "    more = ended and finished and count > known\n",
        "    more = False\n",
        "test_rules.py",
    ),
    fault(
        "shape, dtype and device are not compared",
        "_verify.py",
        "            if all(map(eq, map(plain_signature, tensors), signatures)):  # type: ignore[arg-type]\n",
        "            if True:\n",
        "test_options.py",
    ),
    # --- Ambient state ---
    fault(
        "the generator is not set for the replay",
        "_generators.py",
        "        _cpu_generator.set_state(state)\n    return around\n",
        "        pass\n    return around\n",
        "test_ambient.py",
    ),
    fault(
        "the generator is not put back after the replay",
        "_ambient.py",
        "            undo.append(partial(set_cpu_state, swap_cpu_state(self.cpu_state)))\n",
        "            swap_cpu_state(self.cpu_state)\n",
        "test_ambient.py",
    ),
    fault(
        "autocast is not restored",
        "_ambient.py",
        "        self._put(self._seen)\n",
        "",
        "test_ambient.py",
    ),
    fault(
        "autocast is not put back after the replay",
        "_ambient.py",
        "            self._put(now)\n",
        "            pass\n",
        "test_ambient.py",
    ),
    fault(
        "casts that a replay cached outlive it",
        "_ambient.py",
        "                torch.clear_autocast_cache()\n",
        "                pass\n",
        "test_ambient.py",
    ),
    fault(
        "the kernels that may be chosen are not restored",
        "_ambient.py",
        "        put_kernel_switches(self._switches)\n",
        "",
        "test_ambient.py",
    ),
    fault(
        "the kernels that may be chosen are not put back after the replay",
        "_ambient.py",
        "        return partial(put_kernel_switches, now)\n",
        "        return None\n",
        "test_ambient.py",
    ),
    fault(
        "the default dtype is not restored",
        "_ambient.py",
        "        set_default_dtype(self._dtype)\n",
        "",
        "test_random.py",
    ),
    fault(
        "the default device is not restored",
        "_ambient.py",
        "        if default_device() == self._device:\n",
        "        if True:\n",
        "test_ambient.py",
    ),
    fault(
        "grad mode stays off in the replay",
        "_engine/replay.py",
        "        set_grad_enabled(True)\n",
        "",
        "test_ambient.py",
    ),
    fault(
        "the reentrant variant does not restore the random state",
        "_engine/reentrant.py",
        "        ctx.ambient.restore(undo)\n",
        "",
        "test_reentrant.py",
    ),
    fault(
        "the reentrant variant does not put the random state back",
        "_engine/reentrant.py",
        "        undo_all(undo)\n",
        "",
        "test_reentrant.py",
    ),
    # --- Modules, buffers, weights ---
    fault(
        "training flags are not set for the replay",
        "_restored.py",
        "        self._put(self.flags)\n",
        "",
        "test_guards.py::test_modes_of_modules",
    ),
    fault(
        "training flags are not put back after the replay",
        "_restored.py",
        "        return partial(self._put, now)\n",
        "        return None\n",
        "test_guards.py::test_modes_are_left_as_they_are_found",
    ),
    fault(
        "buffers are not put back after the replay",
        "_restored.py",
        "            overwrite(tensors, after)\n",
        "",
        "test_state.py::test_state_is_as_after_one_forward",
    ),
    fault(
        "buffers are not reset before the replay",
        "_restored.py",
        "        overwrite([tensor for tensor, _ in read], [before for _, before in read])\n",
        "",
        "test_state.py::test_state_is_as_after_one_forward",
    ),
    fault(
        "a recovered buffer is not copied before it is put back",
        "_engine/replay.py",
        "                if memory := inspection.memory_that_changes_again():\n",
        "                if memory := ():\n",
        "test_state.py::test_state_that_is_itself_saved",
    ),
    fault(
        "the versions of buffers are not put back",
        "_restored.py",
        "            put_versions([tensors[index] for index in counted], [versions[index] for index in counted])\n",
        "",
        "test_state.py::test_other_graphs_do_not_notice_that_state_was_put_back",
    ),
    fault(
        "a weight that was changed is not noticed",
        "_guards.py",
        "        if self._watched and versions_of(self._there()) != self._versions:\n",
        "        if False:\n",
        "test_easily_broken.py",
    ),
    fault(
        "a weight that was replaced is not noticed",
        "_guards.py",
        "                continue\n            return then, now\n",
        "                continue\n",
        "test_guards.py::test_a_bias_that_was_replaced",
        "test_guards.py::test_a_weight_that_was_replaced",
    ),
    fault(
        "a guard holds the leaves that the function made",
        "_verification.py",
        "        leaves.by_slot[slot] = weakref.ref(leaf)\n",
        "        leaves.by_slot[slot] = lambda: leaf\n",
        "test_memory.py::test_bytes_are_never_above_stock_pytorch",
    ),
    fault(
        "a guard holds the leaves that are watched",
        "_guards.py",
        "        self._watched = list(map(weakref.ref, watched))\n",
        "        self._watched = [partial(_itself, one) for one in watched]\n",
        "test_replay_graph.py::test_a_leaf_that_goes_with_a_part_of_the_graph",
    ),
    fault(
        "the versions of leaves that are gone stay",
        "_guards.py",
        "            self._versions = [then for one, then in pairs if id(one()) in alive]\n",
        "",
        "test_replay_graph.py::test_a_leaf_that_goes_with_a_part_of_the_graph",
    ),
    fault(
        "another leaf in the place of one that is gone is not noticed",
        "_guards.py",
        "        return leaf is None or (tensor is not leaf and _base_of(tensor) is not leaf)\n",
        "        return tensor is not leaf and _base_of(tensor) is not leaf and leaf is not None\n",
        "test_replay_graph.py::test_a_leaf_in_the_place_of_one_that_is_gone",
    ),
    fault(
        "a replay recovers tensors with their place in its graph",
        "_engine/replay.py",
        "        kept = tensor.detach() if tensor.requires_grad else tensor\n        try:\n",
        "        kept = tensor\n        try:\n",
        "test_replay_graph.py",
    ),
    fault(
        "another leaf in the place of a leaf is not noticed",
        "_guards.py",
        "        return leaf is None or (tensor is not leaf and _base_of(tensor) is not leaf)\n",
        "        return False\n",
        "test_guards.py::test_a_late_binding_closure_over_leaves",
    ),
    fault(
        "what was changed and is only read is not looked for",
        "_guards.py",
        "                if suspect is not None and suspect() is owner:\n",
        "                if False:\n",
        "test_guards.py::test_a_bias_that_changed_by_hand",
    ),
    fault(
        "what has the identity of a tensor that is gone is taken for it",
        "_guards.py",
        "                if suspect is not None and suspect() is owner:\n",
        "                if suspect is not None:\n",
        "test_guards.py",
    ),
    fault(
        "the steps of an optimizer are not counted",
        "_optimizers.py",
        "    Steps.count += 1\n",
        "",
        "test_guards.py::test_a_step_that_clears_the_gradients",
    ),
    # --- Values ---
    fault(
        "a digest does not see where a number stands",
        "_digest.py",
        "torch.randn(",
        "(lambda *size, generator, **options: torch.ones(*size, **options))(",
        "test_digest.py",
    ),
    fault(
        "a digest does not see where an integer stands",
        "_digest.py",
        "(rest * within[: rest.numel()]).sum()",
        "rest.sum()",
        "test_digest.py",
    ),
    fault(
        "every difference is tolerated",
        "_digest.py",
        "    return 0.0 if relative <= _tolerances.get(real, _tolerances[None]) else relative\n",
        "    return 0.0\n",
        "test_digest.py",
    ),
    fault(
        "a function counts as verified before its replay",
        "_verification.py",
        "        read = leaves.read()\n",
        "        read = leaves.read()\n        known.verified = True\n",
        "test_values.py",
    ),
    fault(
        "a function counts as verified though its values differ",
        "_verification.py",
        "        if unequal is None and not self._made_buffers:\n            self._known.verify(self._flags)\n",
        "        self._known.verify(self._flags)\n",
        "test_values.py",
    ),
    fault(
        "a function is verified in every mode of its modules",
        "_known.py",
        "        if flags != self.flags:\n",
        "        if not self.flags:\n",
        "test_state.py::test_state_of_a_part_whose_mode_changes",
    ),
    fault(
        "who saves other leaves is taken to do what was recorded",
        "_known.py",
        "        if leaves.keys() <= self.familiar.keys() or self._strange >= _FEW_LOOKS:\n",
        "        if True:\n",
        "test_state.py",
    ),
    fault(
        "any new leaf has a replay recorded",
        "_known.py",
        "any(isinstance(leaf, Parameter) for",
        "any(True for",
        "test_state.py",
    ),
    fault(
        "a buffer that begins to change is not noticed",
        "_verification.py",
        "            self._is_new = now != self._versions\n",
        "",
        "test_state.py",
    ),
    fault(
        "what a replay is the first to show to be changed stays changed",
        "_engine/replay.py",
        "                undo.append(partial(verification.put_back, inspection))\n",
        "",
        "test_state.py",
    ),
    fault(
        "the forward that makes buffers counts as one that shows what is changed",
        "_verification.py",
        "            self._made_buffers = True\n",
        "",
        "test_state.py::test_state_that_the_first_forward_makes",
    ),
    fault(
        "buffers that were put in the place of others are left there for the replay",
        "_restored.py",
        "        self._put(self._before)\n        return partial(self._put, after)\n",
        "        return partial(self._put, after)\n",
        "test_state.py::test_state_that_is_put_in_the_place_of_the_old",
    ),
    fault(
        "layers that share their code are verified as one",
        "_known.py",
        "    key = (id(code), name, training, *map(id, owners))\n",
        "    key = (id(code), name, training)\n",
        "test_values.py",
    ),
    fault(
        "a digest is taken before the noise is written",
        "_record.py",
        "            self._unfilled.append((len(self.saved), tensor))\n            self.saved.append(Saved(None,",
        "            self.saved.append(Saved(digest(tensor),",
        "test_easily_broken.py",
    ),
    fault(
        "what runs beside a function is recorded as a part of it",
        "_engine/scope.py",
        "(*scope.modes, scope.trace, scope.recorder)",
        "(*scope.modes, scope.frame.trace)",
        "test_easily_broken.py",
    ),
    # --- The journal, and what happens once ---
    fault(
        "the journal does not move on over an inner region",
        "_engine/frame.py",
        "        outer.position = scope.position\n",
        "        pass\n",
        "test_easily_broken.py",
        "test_regions.py::test_policies_with_a_state_at_every_level",
    ),
    fault(
        "the journal is written within a replay",
        "_engine/scope.py",
        "        if not self.following:\n",
        "        if not self.replaying:\n",
        "test_effects.py",
    ),
    fault(
        "a forward within a replay counts as the first",
        "_engine/scope.py",
        "            self.following |= around.following\n",
        "",
        "test_effects.py",
    ),
    fault(
        "a pinned function is run in the replay",
        "_engine/pinned.py",
        "        result: R = run(function, args, kwargs)\n        return result\n\n    return pinned\n",
        "        result: R = function(*args, **kwargs)\n        return result\n\n    return pinned\n",
        "test_effects.py",
    ),
    fault(
        "what happens once happens twice",
        "_engine/pinned.py",
        "    result: R = call_once(function, args, kwargs)\n    return result\n\n\ndef pin",
        "    result: R = function(*args, **kwargs)\n    return result\n\n\ndef pin",
        "test_effects.py",
    ),
    fault(
        "a pinned function leaves the random state where it was",
        "_engine/pinned.py",
        "            state.put()\n            break\n",
        "            break\n",
        "test_effects.py",
    ),
    fault(
        "a pinned value can be changed by who is handed it",
        "_engine/pinned.py",
        "give(copy_of(one.value), one",
        "give(one.value, one",
        "test_effects.py",
    ),
    # --- Policies, and what they keep ---
    fault(
        "a policy is asked again in the replay",
        "_engine/selective.py",
        "        if not self._scope.following:\n            try:\n",
        "        if True:\n            try:\n",
        "test_policies.py::test_a_policy_in_an_inner_region_is_asked_in_the_forward_only",
        "test_policies.py::test_policies_at_every_level_are_asked_in_the_forward_only",
    ),
    fault(
        "a kept region leaves the random state where it was",
        "_engine/kept_region.py",
        "            regions.put_random(region.random)\n",
        "            pass\n",
        "test_random.py::test_a_kept_named_region_that_draws",
    ),
    fault(
        "a kept operator leaves the random state where it was",
        "_engine/selective.py",
        "            one.after.put()\n",
        "            pass\n",
        "test_policies.py::test_what_is_kept_leaves_the_random_numbers_of_the_rest",
    ),
    fault(
        "what is kept is not watched for changes",
        "_kept.py",
        "        return moves != self._reshapes\n",
        "        return False\n",
        "test_policies.py::test_an_output_that_is_changed_after_the_region_is_an_error_that_says_so",
    ),
    fault(
        "what is kept is handed out in another order of calls",
        "_engine/selective.py",
        "        kept = calls[index]\n",
        "        kept = calls[-1 - index]\n",
        "test_policies.py::test_one_operator_called_often_is_kept_in_order",
    ),
    fault(
        "a kept output is handed out to a call from elsewhere",
        "_engine/selective.py",
        "        if self._finished and first is not None and first.packed != self._packed():\n",
        "        if False:\n",
        "test_kept_values.py::test_a_replay_that_runs_a_kept_operator_less_often_is_found_out",
    ),
    fault(
        "what a stopped replay did not reach stays",
        "_engine/replay.py",
        "        let_go(frame)\n",
        "        pass\n",
        "test_kept_values.py",
    ),
    fault(
        "a kept region packs another argument",
        "_engine/inside.py",
        "            scope.pack(tensors[index])\n",
        "            scope.pack(tensors[-1 - index])\n",
        "test_regions.py::test_outputs_gradients_and_random_state_equal_those_of_plain_autograd",
    ),
    fault(
        "a kept region that changes its arguments is not run again",
        "_engine/kept_region.py",
        "tuple(used) if is_unchanged else None",
        "tuple(used)",
        "test_regions.py::test_outputs_gradients_and_random_state_equal_those_of_plain_autograd",
    ),
    fault(
        "dispatch modes see what runs inside a kept region",
        "_engine/inside.py",
        "    for mode in paused:\n        mode.paused = True\n",
        "",
        "test_kept_values.py",
    ),
    fault(
        "the drop-in does not count the calls of an operator",
        "_engine/caching.py",
        "or first is None or first.call != call:",
        "or first is None:",
        "test_selective.py::test_saved_outputs_come_back_in_order_for_each_operator",
    ),
    # --- Nested regions ---
    fault(
        "an inner region's input loses its place in the graph",
        "_inputs.py",
        "        return self._place.put(tensor)\n",
        "        return tensor\n",
        "test_rules.py",
    ),
    fault(
        "an inner region's input loses its class",
        "_torch.py",
        "            tensor.__class__ = kind\n",
        "            pass\n",
        "test_rules.py::test_rule_10_a_subclass_with_operators_of_its_own_as_input_of_an_inner_region",
    ),
    fault(
        "a view made without grad comes back as a leaf",
        "_torch.py",
        "        if tensor._base is not None and is_view_without_grad(tensor):\n",
        "        if False:\n",
        "test_rules.py::test_rule_2_a_view_made_without_grad_as_input_of_an_inner_region",
    ),
    fault(
        "an inner region's input comes back with other strides",
        "_inputs.py",
        "            tensor = with_stride(tensor, self._stride)\n",
        "            pass\n",
        "test_rules.py",
    ),
    # --- Decided modules ---
    fault(
        "a kept module is run in the replay",
        "_decided.py",
        "    mark = Mark(decided.name, decision)\n",
        "    mark = Mark(decided.name, Recompute())\n",
        "test_modules.py",
    ),
    fault(
        "a decision of a module inside a kept one is not asked",
        "_decided.py",
        "    if scope.saving and type(decision) is not Recompute:\n",
        "    if scope.saving:\n",
        "test_modules.py",
    ),
    fault(
        "a policy around reaches into a module that is recomputed by decision",
        "_decided.py",
        "    if not scope.saving and scope.policy is None and type(decision)",
        "    if not scope.saving and type(decision)",
        "test_modules.py",
    ),
    fault(
        "a decided module decides where nothing is recorded",
        "_decided.py",
        "        if decided is None or not torch.is_grad_enabled():\n",
        "        if decided is None:\n",
        "test_modules.py",
    ),
    fault(
        "overrides of a run do not reach a region inside a kept module",
        "_decided.py",
        "kwargs, overridden(decided.options))",
        "kwargs, decided.options)",
        "test_modules.py",
    ),
    fault(
        "what is kept by decision counts as let go of",
        "_decided.py",
        '        if fate == "recomputed" and not',
        "        if not",
        "test_modules.py",
    ),
    fault(
        "all modules share what is known of the parts that replays come by",
        "_steps.py",
        "    if isinstance(owner, Module) and function.__name__ in _CALLS:\n        return owner\n",
        "",
        "test_modules.py",
    ),
    fault(
        "a pickled module refers to the class that was made for it",
        "_decided.py",
        "        args = tuple(own if one is kind else one for one in args)\n",
        "",
        "test_decided.py",
    ),
    fault(
        "a module that copies itself loses its decision",
        "_decided.py",
        '        if hasattr(own, "__deepcopy__"):\n',
        '        if hasattr(own, "__deep_copy__"):\n',
        "test_decided.py",
    ),
    fault(
        "taking a decision off a module takes it off its parametrized copy",
        "_decided.py",
        " and not (decided is None or decided.is_copied):\n",
        ":\n",
        "test_decided.py",
    ),
    fault(
        "a decided class stands above a parametrization",
        "_decided.py",
        "_parametrized_class(kind) if _is_parametrized(module) else _decided_class(kind)",
        "_decided_class(kind)",
        "test_decided.py",
    ),
    fault(
        "subclass hooks of the user's run for a decided class",
        "_decided.py",
        '        """Keep what the module\'s own class does for its subclasses from happening: this is none."""\n',
        "        super().__init_subclass__()\n",
        "test_decided.py",
    ),
    fault(
        "an old handle takes off what another decided",
        "_decided.py",
        "    return module.__dict__.get(_KEY) is decided\n",
        "    return True\n",
        "test_modules.py",
    ),
    fault(
        "an earlier entry wins",
        "modules.py",
        "            one.entry = entry\n",
        "            one.entry = one.entry or entry\n",
        "test_modules.py",
    ),
    fault(
        "a model is not verified again under other decisions",
        "modules.py",
        "    if now not in had:\n",
        "    if not had:\n",
        "test_modules.py",
    ),
    fault(
        "a part with a policy of its own hides its operators from the record",
        "_engine/named.py",
        ", or_nothing(mode and scope.recorder)",
        "",
        "test_modules.py",
    ),
    fault(
        "a part with a policy of its own hides its operators from the trace",
        "_engine/named.py",
        ", or_nothing(mode and scope.trace)",
        "",
        "test_modules.py",
    ),
    fault(
        "the policy of the function goes on inside a part with its own",
        "_engine/named.py",
        "    paused = [mode for mode in scope.modes if not mode.paused]\n",
        "    paused: list[Any] = []\n",
        "test_modules.py",
    ),
    fault(
        "what was kept unasked and changed since is handed out, or refused",
        "_engine/selective.py",
        "first.copies_on_write and any(one.is_changed() for one in kepts_in(kept))",
        "False",
        "test_modules.py",
    ),
    fault(
        "memory that has yet to be written is kept",
        "_engine/selective.py",
        "kind.is_kept and not kind.is_unwritten\n",
        "kind.is_kept\n",
        "test_policies.py",
    ),
    fault(
        "a policy that would keep views alone counts as one that keeps something",
        "_engine/selective.py",
        "policy.counts(decision if can_be_kept else Recompute())",
        "policy.counts(decision)",
        "test_policies.py",
    ),
    fault(
        "a moment that takes nothing by itself is no bound",
        "_milp.py",
        "        if bytes_ is not None:\n",
        "        if bytes_:\n",
        "test_solver.py",
    ),
    fault(
        "a guard runs a parametrization",
        "_guards.py",
        "            now = None if owner is None else parameter_of(owner, name)\n",
        "            now = None if owner is None else getattr(owner, name, None)\n",
        "test_guards.py::test_a_guard_does_not_run_a_parametrization",
    ),
    # --- Stores ---
    fault(
        "what is on its way out is not held",
        "_stores/flights.py",
        "        self.source: Tensor | None = source\n",
        "        self.source: Tensor | None = None\n",
        "test_offload.py::test_gradients_are_the_same",
    ),
    fault(
        "what comes back does not wait until it has left",
        "_stores/media.py",
        "[self.left, link.now()])",
        "[link.now()])",
        "test_offload.py::test_what_is_asked_for_while_it_leaves_comes_back_when_it_has_left",
    ),
    fault(
        "a view that counts its changes apart is not watched",
        "_stores/store.py",
        "                copy.aliases += ((_without_values(alias), version_of(alias)),)\n",
        "                pass\n",
        "test_offload.py::test_a_change_of_a_view_that_counts_apart_is_a_change_of_what_is_copied",
    ),
    fault(
        "what was changed through another view is found as it was",
        "_stores/store.py",
        " and not copy.is_changed() else None\n",
        " else None\n",
        "test_offload.py::test_what_was_changed_through_a_view_that_counts_apart_is_copied_anew",
    ),
    fault(
        "copies have no time to spare on their way back",
        "_stores/courses.py",
        "- (1 + SPARE) * durations[index]",
        "- durations[index]",
        "test_offload.py::test_when_to_begin_at_the_latest",
        "test_offload_times.py",
    ),
    fault(
        "copies are expected to have left in no more time than before",
        "_stores/courses.py",
        "self._rate_out() / (1 + SPARE))",
        "self._rate_out())",
        "test_offload_times.py",
    ),
    fault(
        "inputs that were changed are held though no replay can use them",
        "_inputs.py",
        "            self._let_go(change)\n            del arguments",
        "            self._changed = change\n            del arguments",
        "test_memory.py::test_nothing_is_left",
    ),
    fault(
        "code of the user's runs while others wait for a store",
        "_stores/store.py",
        "        with self._lock, out_of_sight():  # all of it: modes",
        "        with self._lock:  # all of it: modes",
        "test_offload.py::test_no_code_of_the_users_runs_while_others_wait_for_the_store",
    ),
    fault(
        "a change through a view that counts apart is not seen in the replay of a region around",
        "_kept.py",
        "                    original.kept_aliases = self._aliases  # type: ignore[attr-defined]\n",
        "                    pass\n",
        "test_kept_values.py::test_a_kept_product_that_is_changed_through_a_view_that_counts_apart",
    ),
    fault(
        "what is to be offloaded and is in the hands of a region around may not be changed",
        "_engine/selective.py",
        "isinstance(decision, (SaveOrCopy, Offload))",
        "isinstance(decision, SaveOrCopy)",
        "test_kept_values.py::test_a_kept_product_that_is_changed_through_a_view_that_counts_apart",
    ),
    fault(
        "of many views over one memory all are watched",
        "_stores/store.py",
        "if len(copy.aliases) < _WATCHED:",
        "if True:",
        "test_offload.py::test_of_many_views_that_count_apart_a_change_waits",
    ),
    fault(
        "what waits longest is not what is counted",
        "_stores/store.py",
        "            landed.append(flight)\n",
        "            landed.insert(0, flight)\n",
        "test_offload_times.py::test_what_the_device_waits_for_is_counted",
    ),
    fault(
        "each rank warms up as it likes",
        "_alone.py",
        "range(worst([math.ceil(_WARM_UP / once)])[0])",
        "range(math.ceil(_WARM_UP / once))",
        "test_plan_steps.py::test_ranks_warm_up_as_often_as_each_other",
    ),
    fault(
        "weights with a history are left out of a chain's budget",
        "_chains/measured.py",
        "            others += [GradientEdge(*edge) for edge in edges]  # those that have a history\n",
        "",
        "test_chains_loops.py::test_weights_with_a_history_count_alike",
    ),
    fault(
        "gradients that are summed over steps count once in a chain's budget",
        "_chains/measured.py",
        "            on_top += of_weights  # the sum, beside what it is of\n",
        "            on_top -= of_weights\n",
        "test_chains_loops.py::test_gradients_of_a_weight_of_several_steps_are_summed_within_a_budget",
    ),
    fault(
        "measuring a known step for a budget leaves what it changes outside",
        "_chains/measured.py",
        "(known.step.is_loose or not known.step.is_looked_at) and can_be_recorded()",
        "not known.step.is_looked_at and can_be_recorded()",
        "test_chains_loops.py::test_measuring_what_is_known_puts_back_what_steps_change_outside",
    ),
    fault(
        "failed attempts of a plan leave their graphs behind",
        "_tried.py",
        "            self._frames.release_what_cannot_be_replayed()\n",
        "            pass\n",
        "test_plan_steps.py::test_a_choice_that_fails_leaves_no_memory_behind",
    ),
    fault(
        "a chain's budget forgets what the gradients of weights take on the way",
        "_chains/measured.py",
        "for weights in (False, True))",
        "for weights in (False,))",
        "test_chains_loops.py::test_what_the_gradients_of_weights_take_on_the_way_is_in_a_budget",
    ),
    fault(
        "offloading has no price beside the time that is waited for",
        "_options.py",
        "                        seconds=option.seconds + price * option.kept,\n",
        "",
        "test_travel.py::test_what_is_offloaded_is_paid_for",
    ),
    fault(
        "plans count on all that the link carries",
        "profile.py",
        "(rate / (1 + SPARE) for rate in self.link)",
        "self.link",
        "test_travel.py",
    ),
    fault(
        "a step is followed as another one while it passes by parts that copy nothing",
        "_stores/store.py",
        "            step.comes_to(-part)\n",
        "            step.comes_to(-1)\n",
        "test_offload_times.py::test_other_steps_in_between_make_no_step_wait",
    ),
    fault(
        "what is expected of a copy is what was expected of another step",
        "_stores/courses.py",
        "        if self.course is not None and not self.course.goes_on(place, sign):\n",
        "        if self.course is not None and place % 8 == 7 and not self.course.goes_on(place, sign):\n",
        "test_offload_times.py::test_other_steps_in_between_make_no_step_wait",
    ),
    fault(
        "only modules right beside one that is offloaded leave marks",
        "modules.py",
        "    around = {above for one in offloaded for name in one.names for above in _names_above(name)}\n",
        "    around = {name.rpartition('.')[0] for one in offloaded for name in one.names}\n",
        "test_offload.py::test_marks_are_made_at_every_level_and_within_containers",
    ),
    fault(
        "each step teaches another course",
        "_stores/courses.py",
        "        return self.seen >= _SETTLED\n",
        "        return False\n",
        "test_offload_times.py::test_steps_hold_the_same_memory_though_they_take_other_times",
    ),
    fault(
        "a course that is known is never left",
        "_stores/courses.py",
        "        return self._strikes < _STRIKES\n",
        "        return True\n",
        "test_offload_times.py::test_a_course_that_is_kept_is_left_when_it_does_not_hold_any_more",
    ),
    fault(
        "one step that has to wait makes a course be left",
        "_stores/courses.py",
        "_STRIKES = 2",
        "_STRIKES = 1",
        "test_offload_times.py::test_one_step_that_is_unlike_the_others_changes_nothing",
    ),
    fault(
        "what the last of some steps has shown counts alone",
        "_stores/courses.py",
        "                course.join(known, ahead)\n",
        "                course.seen = known.seen + 1\n",
        "test_offload_times.py",
    ),
    fault(
        "plans take what is offloaded for gone at once",
        "_problem.py",
        "        leaving.append(choice.out + max(0.0, leaving[-1] - left))\n",
        "        leaving.append(0.0)\n",
        "test_offload_times.py::test_plans_count_what_is_on_its_way",
        "test_solver.py",
    ),
    fault(
        "plans take what is offloaded for back at the last moment",
        "_problem.py",
        "        early = back[i - 1] + choices[i - 1].out if i else 0.0\n",
        "        early = 0.0\n",
        "test_solver.py",
    ),
    fault(
        "more may be on its way than may be",
        "_problem.py",
        "        and _excess_on_the_way(problem, choices) <= 0.0\n",
        "",
        "test_solver.py",
    ),
    fault(
        "check takes kernels that are not deterministic where others are",
        "_check.py",
        '    torch.set_deterministic_debug_mode("error")\n',
        '    torch.set_deterministic_debug_mode("warn")\n',
        "test_cli.py::test_check_asks_for_deterministic_kernels_as_far_as_there_are_any",
    ),
    fault(
        "strikes are forgotten with the first step that did not wait",
        "_stores/courses.py",
        "max(self._strikes - _FADING, 0.0)",
        "0.0",
        "test_offload_times.py::test_a_course_is_left_too_if_steps_between_did_not_have_to_wait",
    ),
    fault(
        "short steps may wait as long as long ones",
        "_stores/courses.py",
        "min(_SPARE_MS, 10 * _HARMLESS * took)",
        "_SPARE_MS",
        "test_offload_times.py::test_a_step_that_is_short_is_not_forgiven_what_a_long_one_is",
    ),
    fault(
        "a backward that goes a part of the way is a course of its own",
        "_stores/courses.py",
        "        if self._index.keys() > set(order):\n",
        "        if False:\n",
        "test_offload_times.py::test_a_backward_that_goes_a_part_of_the_way_says_nothing_of_the_rest",
    ),
    fault(
        "a step takes the place of one that the device has not come to the end of",
        "_stores/store.py",
        "            self._ended = self._ended or self._step\n",
        "            self._ended = self._step\n",
        "test_offload_times.py::test_a_host_that_is_more_than_a_step_ahead_learns_too",
    ),
    fault(
        "of long steps some are never learnt",
        "_stores/store.py",
        " or self._steps % _LEARN_EVERY == 0 or not is_known\n",
        " or self._steps % _LEARN_EVERY == 0\n",
        "test_offload_times.py::test_long_steps_of_several_kinds_are_all_learnt",
    ),
    fault(
        "more stays than may be ahead",
        "_stores/courses.py",
        "        if sum(self.signs[place] for place in both) <= ahead:\n            self.stays = both\n",
        "        self.stays = both\n",
        "test_offload.py::test_no_more_stays_than_may_be_ahead",
    ),
    fault(
        "only what one course says is expected to change",
        "_stores/store.py",
        "            place in one.changed and one.begins_like(step.signs) for one in self._courses if one.changed\n",
        "            place in one.changed for one in [step.course] if one is not None\n",
        "test_offload.py::test_a_change_is_expected_also_after_a_step_of_another_kind",
    ),
    fault(
        "a change that is seen while a course is looked at is forgotten",
        "_stores/store.py",
        "                course.changed = course.changed | now.changed  # what has been seen meanwhile\n",
        "                pass\n",
        "test_offload.py::test_a_change_that_is_seen_while_a_course_is_looked_at_is_not_forgotten",
    ),
    fault(
        "what backward did not come to is taken for unchanged",
        "_stores/courses.py",
        "self.changed | (known.changed - askings.keys())",
        "self.changed",
        "test_offload.py::test_a_change_is_expected_also_after_a_backward_that_went_a_part_of_the_way",
    ),
    fault(
        "marks are noted without end",
        "_stores/store.py",
        "            if not self._alive or step is None or step.is_full():\n",
        "            if not self._alive or step is None:\n",
        "test_offload.py::test_a_step_that_leaves_nothing_but_marks_is_not_noted_without_end",
    ),
    fault(
        "all marks of a model go with one handle",
        "modules.py",
        "        for mark in self._marks:\n            mark.remove()\n",
        "        _progress.stop_watching(self._model().modules() if self._model() else ())\n",
        "test_offload.py::test_marks_of_several_handles_come_and_go_by_themselves",
    ),
    fault(
        "what fails half of the way stays decided",
        "modules.py",
        "        handle.remove()\n        raise\n",
        "        raise\n",
        "test_offload.py::test_a_module_that_takes_no_hooks_leaves_nothing_half_decided",
    ),
    fault(
        "hooks are put on scripted modules",
        "modules.py",
        "            continue  # it takes no such hooks\n",
        "            pass\n",
        "test_offload.py::test_marks_are_left_where_hooks_can_be",
    ),
    fault(
        "what must not be chosen is looked at",
        "_solver.py",
        "    return [[k for k in some if k not in out] or some for some, out in zip(options, never, strict=True)]\n",
        "    return options\n",
        "test_solver.py",
    ),
    fault(
        "a moment of less than nothing counts as nothing",
        "_milp.py",
        "others.get(moment.after, moment.bytes)",
        "others.get(moment.after, 0)",
        "test_solver.py::test_what_was_found_to_be_not_the_best",
    ),
    fault(
        "alike blocks are taken together though what is there rises",
        "_milp.py",
        "need >= max(rise, 0) for",
        "need >= 0 for",
        "test_solver.py",
    ),
    fault(
        "check holds what a step has computed while it runs another",
        "_check.py",
        "        except RuntimeError as error:  # it holds what was computed, until here\n",
        "        except RuntimeError as failed:\n            error = failed\n",
        "test_cli.py::test_check_holds_nothing_of_a_step_that_it_runs_again",
    ),
    fault(
        "copies cost the work beside them nothing",
        "_travel.py",
        "min(max(longer / (size * count), _LEAST), 1 / link[0] + 1 / link[1])",
        "0.0",
        "test_travel.py",
    ),
    fault(
        "memory of the host is used again while it is read",
        "_stores/pool.py",
        "        return [moment for one, moment in self._slab.busy.items() if one != stream]\n",
        "        return []\n",
        "test_offload.py::test_memory_of_the_host_that_is_still_read_is_not_overwritten",
    ),
    fault(
        "a storage is one copy whatever its version",
        "_stores/store.py",
        "tensor.untyped_storage().data_ptr(), version_of(tensor)\n",
        "tensor.untyped_storage().data_ptr()\n",
        "test_offload.py::test_what_outlives_a_step_and_is_changed_is_copied_again",
    ),
    fault(
        "a change before a copy has left is no error",
        "_stores/store.py",
        "            if not copy.is_sure:\n                self._surprises",
        "            if False:\n                self._surprises",
        "test_offload.py::test_a_change_that_was_not_expected_is_an_error_and_works_the_next_time",
    ),
    fault(
        "a first step waits for no copy",
        "_stores/store.py",
        "(self._changes or self._steps == 1)",
        "self._changes",
        "test_offload.py::test_what_is_saved_changed_and_saved_again_is_two_copies",
    ),
    fault(
        "what came back is handed out changed",
        "_stores/store.py",
        "        if incoming is not None and version_of(incoming.memory):",
        "        if False:",
        "test_offload.py::test_who_changes_what_came_back_changes_it_for_nobody_else",
    ),
    fault(
        "there is no bound on what is in flight",
        "_stores/flights.py",
        "        while self._bytes > bound and",
        "        while False and",
        "test_offload.py::test_no_more_is_on_its_way_out_than_may_be",
    ),
    fault(
        "there is no bound on what is ahead",
        "_stores/store.py",
        "        if self._ahead_bytes and self._ahead_bytes + copy.size > bound:",
        "        if False:",
        "test_offload.py::test_no_more_is_back_ahead_than_may_be",
    ),
    fault(
        "buffers are copied",
        "_stores/store.py",
        "            and not (tensor.grad_fn is None and _is_of_a_module(tensor))\n",
        "",
        "test_offload.py::test_what_is_never_copied",
    ),
    fault(
        "what lasts is copied in every step",
        "_stores/store.py",
        "        if lasting is not None and lasting[0] == storage:",
        "        if False:",
        "test_offload.py::test_what_outlives_a_step_unchanged_is_not_copied_again",
    ),
    fault(
        "replays put what they save",
        "offload.py",
        "        return tensor if scope is not None and scope.following else keep(tensor)",
        "        return keep(tensor)",
        "test_offload.py::test_inside_of_a_region_it_keeps_what_would_be_recomputed_and_replays_put_nothing",
    ),
    fault(
        "marks tell nothing",
        "_progress.py",
        "            mark(find_tensors((result,), {})[0], self._part)",
        "            pass",
        "test_offload.py::test_marks_let_what_left_first_come_back_in_time",
    ),
    fault(
        "waiting teaches waiting",
        "_stores/courses.py",
        "            if late is not None and late > 0:",
        "            if False:",
        "test_offload.py::test_times_are_those_of_a_device_that_never_waits",
    ),
)


# --- Running ---

# Runs in the child: the package may be installed as editable, and then the working tree could be what is imported.
_CHILD = """
import sys
import recollect
if not recollect.__file__.startswith(sys.argv[1]):
    sys.exit(f"not the copy was imported but {recollect.__file__}")
import pytest
code = pytest.main(sys.argv[2:])
sys.exit(code if code != 1 else 101)  # so that an error of Python's own is not taken for a test that fails
"""
_TEST_FAILED = 101


@dataclass(frozen=True)
class Outcome:
    found: bool
    by: str
    seconds: float
    output: str


def run_tests(copy: Path, tests: list[str], timeout: float) -> Outcome:
    """Run tests on a copy of the package until one fails."""
    # What hypothesis finds on a copy with a fault is not to be tried again on the working tree.
    environment = os.environ | {"PYTHONPATH": str(copy), "HYPOTHESIS_STORAGE_DIRECTORY": str(copy / "hypothesis")}
    options = ["-p", "no:cacheprovider", "-q", "-x", "--tb=short", "-rfE"]
    command = [sys.executable, "-c", _CHILD, str(copy), *options, *(f"tests/{test}" for test in tests)]
    begin = time.monotonic()
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,  # tests start processes of their own, which must go with it
    )
    try:
        output, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        return Outcome(True, f"hangs: no end after {timeout:.0f} s", time.monotonic() - begin, output)
    except BaseException:
        os.killpg(process.pid, signal.SIGKILL)
        raise
    seconds = time.monotonic() - begin
    status = process.returncode
    if status == 0:
        return Outcome(False, "SURVIVES", seconds, output)
    if status < 0:
        return Outcome(True, f"crashes: {signal.Signals(-status).name}", seconds, output)
    if status == _TEST_FAILED:
        first = [line.split(" - ")[0] for line in output.splitlines() if line.startswith(("FAILED ", "ERROR "))]
        if first:
            return Outcome(True, first[0].split("tests/", 1)[-1], seconds, output)
    # The tests did not get as far as to say something about the fault.
    return Outcome(False, f"NO RESULT (status {status})", seconds, output)


def snapshot(to: Path, source: Path) -> Path:
    shutil.copytree(source, to, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    return to


def plant(one: Fault, source: Path) -> str:
    """The text of the file with the fault in it."""
    path = source / "recollect" / one.file
    if not path.exists():
        sys.exit(f"the fault {one.name!r}: there is no file src/recollect/{one.file}")
    text = path.read_text()
    count = text.count(one.old)
    if count != 1:
        sys.exit(f"the fault {one.name!r}: its text occurs {count} times in src/recollect/{one.file}:\n{one.old}")
    text = text.replace(one.old, one.new)
    try:
        compile(text, one.file, "exec")
    except SyntaxError as error:
        sys.exit(f"the fault {one.name!r} makes src/recollect/{one.file} no Python: {error}")
    return text


def try_fault(one: Fault, text: str, source: Path, work: Path, number: int, timeout: float) -> Outcome:
    copy = snapshot(work / str(number), source)
    try:
        (copy / "recollect" / one.file).write_text(text)
        return run_tests(copy, list(one.tests), timeout)
    finally:
        shutil.rmtree(copy)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("name", nargs="*", help="only the faults with one of these in their name or file")
    parser.add_argument("--jobs", type=int, default=2, help="how many at once")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds for one fault; a hang counts as found")
    parser.add_argument("--list", action="store_true", help="show the faults, and run nothing")
    parser.add_argument("--verbose", action="store_true", help="show the output of the tests too")
    options = parser.parse_args()
    faults = [
        one for one in FAULTS if not options.name or any(part in f"{one.name} {one.file}" for part in options.name)
    ]
    if not faults:
        sys.exit(f"no fault has one of these in its name or file: {', '.join(options.name)}")
    names = [one.name for one in FAULTS]
    if len(set(names)) != len(names):
        sys.exit(f"two faults have one name: {sorted({name for name in names if names.count(name) > 1})}")
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        work = Path(folder).resolve()
        source = snapshot(work / "unchanged", PACKAGE.parent)  # somebody may be editing meanwhile
        planted = [plant(one, source) for one in faults]
        if options.list:
            for one in faults:
                print(f"{one.file:24} {one.name}")
            return 0
        with ThreadPoolExecutor(options.jobs) as pool:
            return run(faults, planted, source, work, pool, options)


def run(
    faults: list[Fault],
    planted: list[str],
    source: Path,
    work: Path,
    pool: ThreadPoolExecutor,
    options: argparse.Namespace,
) -> int:
    begin = time.monotonic()
    # A single test need not be run where its whole file is.
    tests = {test for one in faults for test in one.tests}
    needed = sorted(test for test in tests if "::" not in test or test.split("::")[0] not in tests)
    parts = [part for number in range(options.jobs) if (part := needed[number :: options.jobs])]
    limit = options.timeout * len(needed)
    for outcome in pool.map(lambda part: run_tests(source, part, limit), parts):
        if outcome.by != "SURVIVES":
            print(outcome.output)
            print(f"Without any fault the tests fail: {outcome.by}")
            return 1
    print(f"Without a fault the tests pass ({time.monotonic() - begin:.0f} s)\n", flush=True)
    width = max(len(one.name) for one in faults)
    print(f"{'fault':{width}}  seconds  found by")
    tasks = [
        pool.submit(try_fault, one, text, source, work, number, options.timeout)
        for number, (one, text) in enumerate(zip(faults, planted, strict=True))
    ]
    outcomes = []
    try:
        for one, task in zip(faults, tasks, strict=True):
            outcome = task.result()
            outcomes.append(outcome)
            print(f"{one.name:{width}}  {outcome.seconds:7.1f}  {outcome.by}", flush=True)
            if options.verbose or outcome.by.startswith("NO RESULT"):
                print(outcome.output, flush=True)
    finally:
        for task in tasks:
            task.cancel()
    found = sum(outcome.found for outcome in outcomes)
    print(f"\n{found} of {len(faults)} found, in {time.monotonic() - begin:.0f} s")
    return 0 if found == len(faults) else 1


if __name__ == "__main__":
    sys.exit(main())
