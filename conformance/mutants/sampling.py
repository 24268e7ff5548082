"""Faults of sampling."""

from __future__ import annotations

import torch

from octavo.conformance.mutants.base import Call, Mutant, after, before


@after
def highest_of_ties(call: Call) -> None:
    """Of equal maxima the last one wins."""
    logits_RV, out = call["logits_RV"], call["out"]
    last = logits_RV.shape[1] - 1 - logits_RV.flip(-1).argmax(dim=-1)
    is_greedy = (call["temperature_R"] <= 0) & (out >= 0)
    out.copy_(torch.where(is_greedy, last, out))


@before
def one_more_than_top_p(call: Call) -> None:
    """The token after the one at which the mass is reached is kept too."""
    logits_RV, top_p_R = call["logits_RV"].clone(), call["top_p_R"]
    for row in ((call["temperature_R"] > 0) & (top_p_R < 1)).nonzero().flatten().tolist():
        scaled = (logits_RV[row] / call["temperature_R"][row]).softmax(dim=-1)
        mass, ids = scaled.sort(descending=True)
        kept = int(torch.searchsorted(mass.cumsum(0), top_p_R[row])) + 1
        if kept < len(ids):
            logits_RV[row, ids[kept]] = logits_RV[row, ids[kept - 1]]  # ties with the last one kept are kept
    call["logits_RV"] = logits_RV


MUTANTS = (
    Mutant(
        "greedy-tie-highest-id",
        "of equal maxima the highest id is taken",
        "arg-max reductions in parallel, which take whichever comes last",
        "sample",
        highest_of_ties,
    ),
    Mutant(
        "top-p-off-by-one",
        "one token more than top-p allows is kept",
        "samplers that compare the mass before instead of after a token",
        "sample",
        one_more_than_top_p,
    ),
)
