"use strict";
// Which charts the numbers of a run make. The catalogue of stapo-core names the numbers.
stapo.catalogue = JSON.parse(document.getElementById("catalogue").textContent);
stapo.runCharts = (() => {
  const metrics = new Map(stapo.catalogue.metrics.map((metric) => [metric.key, metric]));
  // In the order of a step; a phase has the same colour in every picture.
  const PHASES = stapo.catalogue.metrics.flatMap(({ key }) => (key.startsWith("seconds.") ? [key.slice(8)] : []));

  // A key that ends in * stands for all keys that begin so. Title, note and unit are those of the first key's metric
  // unless given.
  const CHARTS = [
    { id: "held-out", keys: ["eval_accuracy"] },
    { id: "accuracy", keys: ["accuracy"] },
    {
      id: "benchmarks",
      title: "Benchmarks",
      note: "avg@k during training",
      unit: "%",
      scale: 100,
      keys: ["benchmarks.*"],
      ending: ".accuracy",
    },
    {
      id: "reward",
      note: "mean of the sampled responses, and its spread where recorded",
      keys: ["reward_mean", "rewards.*", "reward_std"],
    },
    {
      id: "entropy",
      keys: ["entropy_mean"],
      bands: [
        ["5 to 95 %", "entropy_quantiles.q05", "entropy_quantiles.q95"],
        ["25 to 75 %", "entropy_quantiles.q25", "entropy_quantiles.q75"],
      ],
    },
    {
      id: "length",
      note: "mean, and median with quantiles where recorded",
      keys: ["response_tokens_mean", "response_tokens.q50"],
      bands: [
        ["min to max", "response_tokens.min", "response_tokens.max"],
        ["10 to 90 %", "response_tokens.q10", "response_tokens.q90"],
      ],
    },
    { id: "truncated", keys: ["truncated_share"] },
    { id: "gradient-norm", keys: ["gradient_norm"] },
    {
      id: "kl",
      title: "KL divergence",
      note: "k3 estimate per token",
      keys: ["kl_behavior", "kl_reference", "kl", "kl_*", "kl.*"],
    },
    { id: "clip-fraction", keys: ["clip_fraction"] },
    { id: "ratio", title: "Ratio range", note: "smallest and largest of a step", keys: ["ratio_min", "ratio_max"] },
    {
      id: "silenced",
      title: "Silenced and candidate share",
      note: "of response tokens",
      keys: ["silenced_share", "candidate_share"],
    },
    { id: "silenced-gradient", keys: ["silenced_gradient_share"] },
    { id: "equal-groups", keys: ["equal_rewards_share"] },
    { id: "loss", keys: ["loss"] },
    { id: "learning-rate", keys: ["learning_rate"] },
    {
      id: "speed",
      title: "Tokens per second",
      note: "by phase",
      unit: "tokens/s",
      keys: ["tokens_per_second", "tokens_per_second.*"],
    },
    {
      id: "seconds",
      title: "Seconds by phase",
      note: "of each step",
      keys: [...PHASES.map((phase) => "seconds." + phase), "seconds.*"],
      not: ["seconds.step"],
    },
    {
      id: "waiting",
      title: "Waiting by rank",
      note: "share of a step in which a rank waited for others",
      unit: "%",
      scale: 100,
      keys: ["ranks.*"],
      ending: ".idle_share",
    },
    { id: "memory", keys: ["memory_bytes", "memory_bytes.*"] },
    { id: "exactness", keys: ["exactness_max_abs"] },
  ].map((chart) => {
    const { label: title, about: note, unit, scale } = metrics.get(chart.keys[0]) || {};
    return { title, note, unit, scale, ...chart };
  });
  const HIDDEN = ["seconds.step", "eval_accuracy_before"];

  const matching = (keys, pattern) =>
    pattern.endsWith("*")
      ? keys.filter((key) => key.startsWith(pattern.slice(0, -1)))
      : keys.filter((key) => key === pattern);
  // The charts that a run has keys for, and one chart for each key that no chart names.
  const plan = (keys) => {
    const used = new Set(HIDDEN);
    const charts = [];
    for (const chart of CHARTS) {
      const found = chart.keys
        .flatMap((pattern) => matching(keys, pattern))
        .filter((key) => !(chart.not || []).includes(key) && key.endsWith(chart.ending || ""));
      const bands = (chart.bands || []).filter(([, low, high]) => keys.includes(low) && keys.includes(high));
      for (const key of [...found, ...bands.flatMap(([, low, high]) => [low, high])]) used.add(key);
      if (found.length + bands.length) charts.push({ ...chart, keys: [...new Set(found)], bands });
    }
    const others = keys
      .filter((key) => !used.has(key))
      .map((key) => {
        const { label: title = key, about: note = "", unit, scale } = metrics.get(key) || {};
        const id = "key-" + key.replace(/[^a-z0-9]/gi, "-");
        return { id, title, note, unit, scale, keys: [key], bands: [], isOther: true };
      });
    return [...charts, ...others];
  };
  // The name of a curve among its siblings. A key that the catalogue does not know, such as a reward, names itself.
  const label = (key) =>
    metrics.get(key)?.short ||
    key
      .replace(/^(seconds|tokens_per_second|rewards|benchmarks)\./, "")
      .replace(/\.accuracy$/, "")
      .replace(/^ranks\.(\d+)\.idle_share$/, "rank $1")
      .replace(/_/g, " ");
  return { PHASES, plan, label, AXES: { step: "step", updates: "optimizer steps", tokens: "tokens", hours: "hours" } };
})();
