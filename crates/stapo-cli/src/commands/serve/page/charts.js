"use strict";
// Which charts the numbers of a run make.
stapo.runCharts = (() => {
  // The charts of a run. A key that ends in * stands for all keys that begin so; `scale` multiplies values.
  // In the order of a step; a phase has the same colour in every picture.
  const PHASES = ["rollout", "grade", "calibrate", "update", "record", "evaluate", "checkpoint"];
  const CHARTS = [
    {
      id: "held-out",
      title: "Held-out accuracy",
      note: "held-out problems answered right",
      unit: "%",
      scale: 100,
      keys: ["eval_accuracy"],
    },
    {
      id: "accuracy",
      title: "Training accuracy",
      note: "sampled responses judged right",
      unit: "%",
      scale: 100,
      keys: ["accuracy"],
    },
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
      title: "Reward",
      note: "mean of sampled responses, and its spread where recorded",
      keys: ["reward_mean", "rewards.*", "reward_std"],
    },
    {
      id: "entropy",
      title: "Entropy",
      note: "over response tokens",
      unit: "nats",
      keys: ["entropy_mean"],
      bands: [
        ["5 to 95 %", "entropy_quantiles.q05", "entropy_quantiles.q95"],
        ["25 to 75 %", "entropy_quantiles.q25", "entropy_quantiles.q75"],
      ],
    },
    {
      id: "length",
      title: "Response length",
      note: "mean, and median with quantiles where recorded",
      unit: "tokens",
      keys: ["response_tokens_mean", "response_tokens.q50"],
      bands: [
        ["min to max", "response_tokens.min", "response_tokens.max"],
        ["10 to 90 %", "response_tokens.q10", "response_tokens.q90"],
      ],
    },
    {
      id: "truncated",
      title: "Truncated responses",
      note: "cut by the length limit",
      unit: "%",
      scale: 100,
      keys: ["truncated_share"],
    },
    { id: "gradient-norm", title: "Gradient norm", note: "of all weights, before clipping", keys: ["gradient_norm"] },
    { id: "kl", title: "KL divergence", note: "k3 estimate per token", unit: "nats", keys: ["kl", "kl_*", "kl.*"] },
    {
      id: "clip-fraction",
      title: "Clip fraction",
      note: "tokens whose ratio left its range",
      unit: "%",
      scale: 100,
      keys: ["clip_fraction"],
    },
    {
      id: "ratio",
      title: "Ratio range",
      note: "smallest and largest ratio of a step",
      keys: ["ratio_min", "ratio_max"],
    },
    {
      id: "silenced",
      title: "Silenced and candidate share",
      note: "of response tokens",
      unit: "%",
      scale: 100,
      keys: ["silenced_share", "candidate_share"],
    },
    {
      id: "silenced-gradient",
      title: "Gradient taken out by silencing",
      note: "share of the summed squared gradient norm at the logits",
      unit: "%",
      scale: 100,
      keys: ["silenced_gradient_share"],
    },
    {
      id: "equal-groups",
      title: "Groups with equal rewards",
      note: "they teach nothing",
      unit: "%",
      scale: 100,
      keys: ["equal_rewards_share"],
    },
    { id: "loss", title: "Loss", note: "of the objective", keys: ["loss"] },
    { id: "learning-rate", title: "Learning rate", note: "at the last optimizer step", keys: ["learning_rate"] },
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
      unit: "s",
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
    {
      id: "memory",
      title: "Memory",
      note: "highest so far",
      unit: "GiB",
      scale: 1 / 2 ** 30,
      keys: ["memory_bytes", "memory_bytes.*"],
    },
    {
      id: "exactness",
      title: "Exactness",
      note: "max |logp − behavior_logp|; 0: rollout and training agree to the bit",
      unit: "nats",
      keys: ["exactness_max_abs"],
    },
  ];
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
      const own = chart.keys
        .flatMap((pattern) => matching(keys, pattern))
        .filter((key) => !(chart.not || []).includes(key) && key.endsWith(chart.ending || ""));
      const bands = (chart.bands || []).filter(([, low, high]) => keys.includes(low) && keys.includes(high));
      for (const key of [...own, ...bands.flatMap(([, low, high]) => [low, high])]) used.add(key);
      if (own.length + bands.length) charts.push({ ...chart, keys: [...new Set(own)], bands });
    }
    const others = keys
      .filter((key) => !used.has(key))
      .map((key) => ({
        id: "key-" + key.replace(/[^a-z0-9]/gi, "-"),
        title: key,
        note: "",
        keys: [key],
        bands: [],
        isOther: true,
      }));
    return [...charts, ...others];
  };
  const label = (key) =>
    key
      .replace(/^(seconds|tokens_per_second|rewards|response_tokens|benchmarks)\./, "")
      .replace(/\.accuracy$/, "")
      .replace(/^ranks\.(\d+)\.idle_share$/, "rank $1")
      .replace(/^q50$/, "median")
      .replace(/_/g, " ");
  return {
    PHASES,
    plan,
    label,
    AXES: { step: "step", updates: "optimizer steps", tokens: "tokens", hours: "hours" },
  };
})();
