// The token viewer: draws the responses of `recorded` inside `root`, which holds the controls of viewer.html, sorted by
// `sort`.
stapo.viewer = (root, recorded, sort = "silenced") => {
  const { element, number } = stapo;
  const responses = recorded.responses;
  const at = (id) => root.querySelector("#" + id);
  // Tokens drawn at once; more make the page slow. The button "show more responses" adds as many again.
  const MAX_TOKENS = 30000;
  const state = { by: "fate", only: "all", find: "", sort, whatIf: false, budget: MAX_TOKENS };

  // The responses of each mini-batch, which has separate thresholds.
  const minibatches = new Map();
  for (const r of responses) minibatches.set(r.update, [...(minibatches.get(r.update) || []), r]);

  // The settings under "What if" as a mask of stapo-core.
  const trained = recorded.settings;
  const mask = () => {
    const kind = at("threshold").value;
    const [tauP, logpBelow] = recorded.tau_p[at("tau").value];
    const threshold = { ...trained.thresholds.find((known) => known.kind === kind) };
    for (const id of ["share", "c", "b", "kappa"]) if (id in threshold) threshold[id] = at(id).valueAsNumber;
    return {
      tau_p: tauP,
      logp_below: logpBelow,
      curvature: trained.curvature,
      threshold,
      q: Number(at("q").value),
      select: at("select").value,
      quantile_over: at("over").value,
    };
  };

  const sum = (values) => values.reduce((a, b) => a + b, 0);
  const nTrue = (flags) => flags.filter(Boolean).length;
  const totals = (candidates, silenced, tauH) => ({
    nCandidates: sum(candidates.map(nTrue)),
    nSilenced: sum(silenced.map(nTrue)),
    tauH: tauH.filter((tau) => tau !== null),
    candidates: new Map(responses.map((r, idx) => [r, candidates[idx]])),
    silenced: new Map(responses.map((r, idx) => [r, silenced[idx]])),
  });
  // The fates in the record, which training decided.
  const asTrained = totals(
    responses.map((r) => r.is_candidate),
    responses.map((r) => r.silenced_by.map((by) => by !== null)),
    [...minibatches.values()].map(([first]) => first.tau_h ?? null),
  );
  const whatIf = (settings) => {
    const decided = new Map();
    const tauH = [...minibatches.values()].map((members) => {
      const found = stapo.s2t.decide(members, settings);
      members.forEach((r, idx) => decided.set(r, [found.candidates[idx], found.silenced[idx]]));
      return found.tauH;
    });
    return totals(
      responses.map((r) => decided.get(r)[0]),
      responses.map((r) => decided.get(r)[1]),
      tauH,
    );
  };

  const nRecorded = sum(responses.map((r) => r.logp.length));
  let outcome = asTrained;
  const isCandidate = (r, t) => outcome.candidates.get(r)[t];
  const fate = (r, t) => {
    if (outcome.silenced.get(r)[t]) return "silenced";
    if (r.clipped[t]) return "clipped";
    return isCandidate(r, t) ? "candidate" : "kept";
  };

  const percent = (logp) => number(100 * Math.exp(logp)) + " %";
  const visible = (text) => (text === "" ? "∅" : text.replace(/ /g, "␣").replace(/\n/g, "⏎").replace(/\t/g, "⇥"));

  const description = (r, t) => {
    const lines = [
      "“" +
        visible(r.text[t]) +
        "”  " +
        fate(r, t) +
        (r.silenced_by[t] ? " (trained: silenced by " + r.silenced_by[t] + ")" : ""),
      "probability " + percent(r.logp[t]) + "   log-prob " + number(r.logp[t]),
      "entropy " + number(r.entropy[t]) + " nats   advantage " + number(r.advantage),
      "ratio " + number(r.ratio[t]) + (r.norm ? "   gradient norm " + number(r.norm[t]) : ""),
    ];
    const others = r.alternatives[t] || [];
    if (others.length)
      lines.push("likeliest: " + others.map(([text, logp]) => visible(text) + " " + percent(logp)).join("   "));
    return lines.join("\n");
  };

  const perToken = (value) => responses.flatMap((r) => r.logp.map((_, t) => value(r, t)));
  const norms = responses.every((r) => r.norm) ? perToken((r, t) => r.norm[t]) : null;
  const ends = {
    entropy:
      stapo.s2t.quantile(
        perToken((r, t) => r.entropy[t]),
        0.99,
      ) || 1,
    norm: norms ? stapo.s2t.quantile(norms, 0.99) || 1 : 1,
    advantage: Math.max(1e-9, ...responses.map((r) => Math.abs(r.advantage))),
  };
  const tint = (series, part) =>
    "color-mix(in srgb, var(--s" + series + ") " + Math.round(72 * Math.min(1, Math.max(0, part))) + "%, transparent)";
  const colors = {
    probability: (r, t) => tint(1, -r.logp[t] / Math.log(1e4)),
    entropy: (r, t) => tint(0, r.entropy[t] / ends.entropy),
    advantage: (r) => tint(r.advantage >= 0 ? 0 : 1, Math.abs(r.advantage) / ends.advantage),
    ratio: (r, t) => tint(r.ratio[t] >= 1 ? 0 : 1, Math.abs(Math.log(r.ratio[t])) / Math.log(1.28)),
    norm: (r, t) => (r.norm ? tint(3, r.norm[t] / ends.norm) : "transparent"),
  };

  const legend = () => {
    const box = at("legend");
    box.replaceChildren();
    const bar = (from, low, high, to) => {
      const strip = element("span", "bar");
      strip.style.background = "linear-gradient(to right, " + from + ", " + to + ")";
      box.append(element("span", "", low), strip, element("span", "", high));
    };
    if (state.by === "fate") {
      for (const [name, what] of [
        ["silenced", "silenced"],
        ["candidate", "candidate, kept"],
        ["clipped", "clipped"],
        ["", "kept"],
      ])
        box.append(element("span", "t " + name, what));
      box.append(element("span", "", state.whatIf ? "fates under the what-if settings" : "fates as trained"));
    } else if (state.by === "probability") bar(tint(1, 0), "p = 1", "p ≤ 1e-4", tint(1, 1));
    else if (state.by === "entropy") bar(tint(0, 0), "0 nats", "≥ " + number(ends.entropy) + " nats", tint(0, 1));
    else if (state.by === "advantage")
      bar(tint(1, 1) + ", transparent", "−" + number(ends.advantage), "+" + number(ends.advantage), tint(0, 1));
    else if (state.by === "ratio") bar(tint(1, 1) + ", transparent", "≤ 0.78", "≥ 1.28", tint(0, 1));
    else if (norms) bar(tint(3, 0), "0", "≥ " + number(ends.norm) + " (gradient norm at the logits)", tint(3, 1));
    else box.append(element("span", "", "this run is older than the weight column: no gradient norms"));
  };

  const matches = (r, t) => {
    if (state.only === "silenced" && fate(r, t) !== "silenced") return false;
    if (state.only === "clipped" && !r.clipped[t]) return false;
    if (state.only === "candidates" && !isCandidate(r, t)) return false;
    return state.find === "" || r.text[t].toLowerCase().includes(state.find);
  };

  const nSilenced = (r) => r.logp.filter((_, t) => fate(r, t) === "silenced").length;
  const orders = {
    recorded: () => 0,
    advantage: (a, b) => b.advantage - a.advantage,
    length: (a, b) => b.logp.length - a.logp.length,
    silenced: (a, b) => nSilenced(b) - nSilenced(a),
    improbable: (a, b) => Math.min(0, ...a.logp) - Math.min(0, ...b.logp),
    entropy: (a, b) => sum(b.entropy) / (b.entropy.length || 1) - sum(a.entropy) / (a.entropy.length || 1),
  };

  const cutBy = { length_limit: ", cut by the length limit", turn_limit: ", out of turns" };

  // What an environment answered to a turn: its calls folded, then the given text in grey.
  const answer = (text, turn, nth) => {
    const shown = [element("span", "given", text)];
    if (!turn) return shown;
    const reward = turn.reward ? ", reward " + number(turn.reward) : "";
    const later = typeof turn.return === "number" ? ", return " + number(turn.return) : "";
    const cut = turn.n_cut ? ", cut" : "";
    shown.unshift(element("span", "turn", "turn " + nth + reward + later + cut));
    if (turn.calls.length) {
      const calls = element("details", "calls");
      const failed = turn.calls.filter((call) => call.failed).length;
      const count = turn.calls.length === 1 ? "1 call" : turn.calls.length + " calls";
      calls.append(element("summary", "", count + (failed ? ", " + failed + " failed" : "")));
      for (const call of turn.calls) {
        const end = call.timed_out ? " timed out" : call.failed ? " failed" : "";
        calls.append(element("div", "", (call.tool || "unreadable call") + "(" + call.arguments + ")" + end));
      }
      shown.unshift(calls);
    }
    return shown;
  };

  const card = (r, idx, filtering) => {
    const box = element("article");
    const head = element("h3", "", r.problem + " #" + r.sample);
    const verdict = r.verdict.replace("_", " ");
    head.append(element("span", r.verdict === "right" ? "right" : "wrong", verdict));
    head.append(element("span", "", "A " + (r.advantage >= 0 ? "+" : "−") + number(Math.abs(r.advantage))));
    head.append(
      element(
        "span",
        "",
        r.logp.length + " tokens" + (cutBy[r.finish.kind] || ""),
      ),
    );
    head.append(element("span", "", nSilenced(r) + " silenced"));
    box.append(head, element("p", "prompt", r.prompt + "   [reference " + r.reference + "]"));
    const line = element("div", "tokens");
    const given = new Map(r.given || []);
    let nAnswered = 0;
    const appendGiven = (t) => {
      if (given.has(t)) line.append(...answer(given.get(t), (r.turns || [])[nAnswered], ++nAnswered));
    };
    r.text.forEach((text, t) => {
      appendGiven(t);
      const name = fate(r, t);
      const token = element("span", "t", /^\s*$/.test(text) ? visible(text) : text.replace(/\n/g, "⏎"));
      if (/^\s*$/.test(text)) token.classList.add("space");
      if (state.by === "fate" && name !== "kept") token.classList.add(name);
      if (state.by !== "fate") token.style.background = colors[state.by](r, t);
      if (filtering) token.classList.add(matches(r, t) ? "hit" : "dim");
      token.dataset.at = idx + " " + t;
      line.append(token);
      if (text.includes("\n")) line.append("\n");
    });
    appendGiven(r.text.length);
    box.append(line, ...stapo.program(r.program), ...stapo.opinion(r.judge));
    return box;
  };

  const counted = ({ nCandidates, nSilenced, tauH }) =>
    (trained.in_force || state.whatIf ? nCandidates + " candidates, " : "") +
    (nSilenced + " silenced of " + nRecorded + " tokens") +
    (tauH.length ? "; τh = " + tauH.map((tau) => number(tau)).join(", ") + " nats" : "");
  const showCounts = (problem) => {
    const counts = at("counts");
    counts.dataset.tokens = nRecorded;
    counts.dataset.candidates = outcome.nCandidates;
    counts.dataset.silenced = outcome.nSilenced;
    const settings = state.whatIf && !problem ? "These settings: " + counted(outcome) + ". " : "";
    counts.textContent = (problem ? problem + " " : settings) + "As trained: " + counted(asTrained) + ".";
  };

  const draw = () => {
    const settings = mask();
    const problem = state.whatIf ? stapo.s2t.problem(settings) : null;
    outcome = state.whatIf && !problem ? whatIf(settings) : asTrained;
    at("tau-now").textContent = number(settings.tau_p);
    at("q-now").textContent = settings.q.toFixed(2);
    for (const field of root.querySelectorAll("[data-threshold]"))
      field.hidden = field.dataset.threshold !== settings.threshold.kind;
    showCounts(problem);
    const filtering = state.only !== "all" || state.find !== "";
    const order = responses.map((r, idx) => [r, idx]);
    order.sort(([a, i], [b, j]) => orders[state.sort](a, b) || i - j);
    const shown = order.filter(([r]) => !filtering || r.logp.some((_, t) => matches(r, t)));
    const list = at("responses");
    list.replaceChildren();
    let left = state.budget;
    let drawn = 0;
    for (const [r, idx] of shown) {
      if (left <= 0) break;
      list.append(card(r, idx, filtering));
      left -= r.logp.length;
      drawn += 1;
    }
    at("more").hidden = drawn === shown.length;
    const nFound = filtering ? sum(shown.map(([r]) => r.logp.filter((_, t) => matches(r, t)).length)) : nRecorded;
    at("found").textContent = nFound + " tokens in " + shown.length + " of " + responses.length + " responses";
    legend();
  };

  at("sort").value = sort;
  const reset = () => {
    at("tau").max = recorded.tau_p.length - 1;
    at("tau").value = recorded.tau_p.findIndex(([tau]) => tau === trained.tau_p);
    at("q").value = trained.q;
    at("threshold").value = trained.threshold;
    for (const values of trained.thresholds)
      for (const [id, value] of Object.entries(values)) if (root.querySelector("#" + id)) at(id).value = value;
    at("select").value = trained.select;
    at("over").value = trained.quantile_over;
    state.whatIf = false;
    draw();
  };

  at("scope").textContent = [
    "What if recomputes S2T from the recorded responses of step " + recorded.step,
    minibatches.size > 1 ? ", each of the " + minibatches.size + " mini-batches with a separate quantile τh: " : ": ",
    nRecorded + (recorded.n_step_tokens ? " of the step's " + recorded.n_step_tokens : "") + " tokens. ",
    recorded.n_step_tokens === nRecorded
      ? "Every token of the step is recorded, so the settings of the run give the counts of training. "
      : "Training took quantiles over whole mini-batches, so counts can differ; record.responses records more. ",
    trained.in_force ? "" : "This run had no S2T mask; the settings start at the published ones. ",
    trained.other_masks.length
      ? "What if leaves out the run's other masks: " + trained.other_masks.join(", ").replace(/_/g, " ") + ". "
      : "",
    trained.signals === "behavior"
      ? "The run decided by the behavior policy's entropies, which are not recorded; what if takes the current ones. "
      : "",
  ].join("");

  for (const id of ["by", "only", "sort"])
    at(id).addEventListener("change", () => {
      state[id] = at(id).value;
      state.budget = MAX_TOKENS;
      draw();
    });
  at("find").addEventListener("input", () => {
    state.find = at("find").value.toLowerCase();
    state.budget = MAX_TOKENS;
    draw();
  });
  for (const id of ["tau", "q", "threshold", "share", "c", "b", "kappa", "select", "over"])
    at(id).addEventListener("input", () => {
      state.whatIf = true;
      draw();
    });
  at("reset").addEventListener("click", reset);
  at("more").addEventListener("click", () => {
    state.budget += MAX_TOKENS;
    draw();
  });
  const describeHovered = (event) => {
    const token = event.target.closest ? event.target.closest(".t[data-at]") : null;
    if (!token || token.dataset.t) return;
    const [idx, t] = token.dataset.at.split(" ").map(Number);
    token.dataset.t = description(responses[idx], t);
  };
  root.addEventListener("pointerover", describeHovered);
  root.addEventListener("pointerdown", describeHovered, true);
  reset();
};

// What a judge or a reward model said of a response; nothing for a run without one.
stapo.opinion = (judge) => (judge ? [stapo.element("p", "note", judge)] : []);

// What the tests of a response's program showed; nothing for a response that is not a program.
stapo.program = (program) => {
  if (!program) return [];
  const box = stapo.element("details", "program");
  const spent = program.source ? ", " + stapo.number(program.cpu_seconds) + " s of processor time" : "";
  box.append(stapo.element("summary", "", "program: " + program.end.replace("_", " ") + spent));
  const parts = { "": program.source, "failing test": program.failing_test, printed: program.printed };
  for (const [name, text] of Object.entries(parts).filter(([, text]) => text)) {
    if (name) box.append(stapo.element("p", "note", name));
    box.append(stapo.element("pre", "", text));
  }
  return [box];
};
