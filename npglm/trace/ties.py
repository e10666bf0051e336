"""Choices that nobody recorded: where scores tie, the engine may have chosen otherwise, and its later values tell how."""

from dataclasses import replace
from itertools import combinations, islice

import numpy as np

from npglm.trace.graph import Model, Step, layer_steps, model_steps, run

TIE = 1e-5  # of the row's largest |score|: what f32 scores may be off by
MAX_ALTERNATIVES = 4096


def settle(model: Model, engine, local: dict, step: Step, passed: tuple[str, ...], values, truth, bound: float):
    """Try, row by row, the other ways to break ties in the choices among `passed`, the probes computed on the way to `step`.

    Returns (truth with the rows that fit another choice replaced, [(choice, row)]). `local` takes on the choices found.
    """
    layer = next((int(n.rsplit("-", 1)[1]) for n in reversed(passed) if "-" in n), None)
    if layer is None:
        return truth, []
    path = [s for s in layer_steps(model.config, layer).values() if s.name in passed]
    path += [s for s in (step, *model_steps(model.config).values()) if s.name == step.name][:1]
    size = np.maximum(np.abs(truth).max(-1), 1e-3 * np.abs(truth).max())
    wrong = np.abs(values - truth).max(-1) > bound * size
    truth, settled = np.array(truth), []
    for row in np.flatnonzero(wrong):
        for choice in [s for s in path if s.probe in ("top_k", "ffn_moe_topk")]:
            score_name = choice.inputs[0]
            if score_name not in local or local[score_name].dtype.kind != "f":
                continue
            others = alternatives(local[score_name][row], local[choice.name][row], row if choice.probe == "top_k" else None)
            if not len(others):
                continue
            made = _rerun(model, engine, local, path, choice, int(row), others)
            error = np.abs(made - values[row]).max(-1)
            best = int(np.argmin(error))
            if error[best] <= bound * size[row]:
                truth[row] = made[best]
                chosen = np.array(local[choice.name])
                chosen[row] = others[best]
                local[choice.name] = chosen
                settled.append((choice.name, int(row)))
                break
    return truth, settled


def alternatives(score: np.ndarray, chosen: np.ndarray, last: int | None) -> np.ndarray:
    """Other choices [A,k] of equally good entries. last: entries after it cannot be chosen; None: all can."""
    taken = chosen[chosen >= 0]
    score = np.asarray(score if last is None else score[: last + 1], np.float64)
    edge = score[taken].min()
    tied = np.flatnonzero(np.abs(score - edge) <= TIE * max(np.abs(score[np.isfinite(score)]).max(initial=0), 1e-30))
    sure = [i for i in taken if i not in set(tied.tolist())]
    n = len(taken) - len(sure)
    if len(tied) <= n:
        return np.empty((0, len(chosen)), np.int32)
    out = []
    for some in islice(combinations(tied.tolist(), n), MAX_ALTERNATIVES):
        row = np.full(len(chosen), -1, np.int32)
        row[: len(taken)] = sorted([*sure, *some]) if last is not None else [*sure, *some]
        out.append(row)
    return np.array(out)


def _rerun(model: Model, engine, local: dict, path: list[Step], choice: Step, row: int, others: np.ndarray) -> np.ndarray:
    """The last step of `path` for `row`, once for each alternative."""
    n = len(others)
    made = {choice.name: others}
    for step in path[path.index(choice) + 1 :]:
        whole = engine.place(model, step.layer)
        table = tuple(np.repeat(t[row : row + 1], n, 0) for t in whole.table)
        place = replace(whole, tokens=np.repeat(whole.tokens[row], n), pos=np.full(n, row), table=table)
        inputs = []
        for name in step.inputs:
            everywhere = step.probe == "kqv" and name.startswith(("kv_cmpr-", "k_pe-"))
            inputs.append(made.get(name, local[name] if everywhere else np.repeat(local[name][row : row + 1], n, 0)))
        if any(i in made for i in step.inputs):
            made[step.name] = run(step, place, inputs)[0]
    return made[path[-1].name]
