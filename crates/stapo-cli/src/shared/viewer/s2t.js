// S2T's rule on recorded numbers, for the what-if of the token viewer. stapo-core decides in training; its cases in
// crates/stapo-core/tests/goldens/s2t.json are run against this script.
stapo.s2t = (() => {
  // The quantile of stapo_core::stats: position q (n - 1), interpolated from the nearer end.
  const quantile = (values, q) => {
    if (values.length === 0) return null;
    const sorted = Float64Array.from(values).sort();
    const position = q * (sorted.length - 1);
    const below = Math.floor(position);
    const part = position - below;
    const low = sorted[below];
    const high = sorted[Math.ceil(position)];
    if (part === 0) return low;
    return part < 0.5 ? low + (high - low) * part : high - (high - low) * (1 - part);
  };

  const isRewarded = (r, t) => (r.advantages.length ? r.advantages[t] : r.advantage) > 0;
  const column = (responses, name, isCounted) => responses.flatMap((r) => r[name].filter((_, t) => isCounted(r, t)));

  // Each returns the test for a token that is a candidate if it is rewarded. All comparisons are strict.
  const thresholds = {
    tau_p: (_, mask) => (r, t) => r.logp[t] < mask.logp_below,
    target_share: (responses, mask) => {
      const below = quantile(column(responses, "logp", isRewarded), mask.threshold.share);
      return (r, t) => below !== null && r.logp[t] < below;
    },
    surprise: (_, mask) => (r, t) => -r.logp[t] > mask.threshold.c * r.entropy[t] + mask.threshold.b,
    influence: (_, mask) => (r, t) =>
      r.influence[t] > mask.threshold.kappa * (2 - mask.curvature * r.entropy[t] * r.entropy[t]),
  };
  const SELECTIONS = ["low_entropy", "high_entropy", "full"];
  const SCOPES = ["candidates", "all_tokens", "rewarded_tokens"];

  // Why `mask` cannot be evaluated here; null if it can.
  const problem = (mask) => {
    if (mask.select === "random") return "The run drew tokens at random, and this page cannot repeat the draw.";
    for (const [name, known] of [
      [mask.threshold.kind, Object.keys(thresholds)],
      [mask.select, SELECTIONS],
      [mask.quantile_over, SCOPES],
    ])
      if (!known.includes(name)) return "This page cannot compute “" + name + "”.";
    const numbers = [mask.q, ...Object.values(mask.threshold).filter((value) => typeof value === "number")];
    if (!numbers.every((value) => Number.isFinite(value))) return "A field of the settings holds no number.";
    if (mask.threshold.kind === "target_share" && !(mask.threshold.share >= 0 && mask.threshold.share <= 1))
      return "The share must lie between 0 and 1.";
    return null;
  };

  // The decisions of `mask` on one mini-batch: τh, and for each token whether it is a candidate, and silenced.
  // `mask` is a mask of stapo-core, with ln τp as `logp_below` and the constant C of `influence` as `curvature`.
  const decide = (responses, mask) => {
    const isImprobable = thresholds[mask.threshold.kind](responses, mask);
    const isCandidate = (r, t) => isRewarded(r, t) && isImprobable(r, t);
    const counts = { candidates: isCandidate, all_tokens: () => true, rewarded_tokens: isRewarded };
    const tauH =
      mask.select === "full"
        ? null
        : quantile(
            column(responses, "entropy", counts[mask.quantile_over]),
            mask.select === "high_entropy" ? 1 - mask.q : mask.q,
          );
    const isSilenced = (r, t) => {
      if (!isCandidate(r, t)) return false;
      if (mask.select === "full") return true;
      return tauH !== null && (mask.select === "high_entropy" ? r.entropy[t] > tauH : r.entropy[t] < tauH);
    };
    const each = (test) => responses.map((r) => r.logp.map((_, t) => test(r, t)));
    return { tauH, candidates: each(isCandidate), silenced: each(isSilenced) };
  };

  return { quantile, problem, decide };
})();
