// The token viewer: draws the responses of `recorded` inside `root`, which holds the controls of viewer.html, in the order
// `sort`.
stapo.viewer = (root, recorded, sort = "silenced") => {
  const { element, number } = stapo;
  const responses = recorded.responses;
  const at = (id) => root.querySelector("#" + id);
  // Tokens drawn at once; more make the page slow. The button "show more responses" adds as many again.
  const MAX_TOKENS = 30000;
  const state = { by: "fate", only: "all", find: "", sort, whatIf: false, budget: MAX_TOKENS };

  // The quantile of stapo_core::stats: position q (n - 1), interpolated from the nearer end.
  const quantile = (values, q) => {
    if (values.length === 0) return null;
    const sorted = Float64Array.from(values).sort();
    const place = q * (sorted.length - 1);
    const below = Math.floor(place);
    const part = place - below;
    const low = sorted[below];
    const high = sorted[Math.ceil(place)];
    if (part === 0) return low;
    return part < 0.5 ? low + (high - low) * part : high - (high - low) * (1 - part);
  };

  // What S2T would decide under the settings of the sliders, mini-batch by mini-batch, from the recorded numbers. This is the
  // only place of the page that evaluates S2T's rule (all comparisons strict); fates as trained are read from the record.
  const decide = ({ lnTau, q, select, over }) => {
    const updates = new Map();
    for (const r of responses) {
      if (!updates.has(r.update)) updates.set(r.update, []);
      updates.get(r.update).push(r);
    }
    const isCandidateHere = (r, t) => r.advantage > 0 && r.logp[t] < lnTau;
    const outcome = { nTokens: 0, nCandidates: 0, nSilenced: 0, tauH: [], candidates: new Map(), silenced: new Map() };
    for (const members of updates.values()) {
      const counted = [];
      for (const r of members) r.logp.forEach((_, t) => { if (over === "all_tokens" || isCandidateHere(r, t)) counted.push(r.entropy[t]); });
      const tauH = select === "full" ? null : quantile(counted, select === "high_entropy" ? 1 - q : q);
      if (tauH !== null) outcome.tauH.push(tauH);
      for (const r of members) {
        const candidates = r.logp.map((_, t) => isCandidateHere(r, t));
        const silenced = candidates.map((candidate, t) => {
          if (!candidate) return false;
          if (select === "full") return true;
          if (tauH === null) return false;
          return select === "high_entropy" ? r.entropy[t] > tauH : r.entropy[t] < tauH;
        });
        outcome.nTokens += candidates.length;
        outcome.nCandidates += candidates.filter(Boolean).length;
        outcome.nSilenced += silenced.filter(Boolean).length;
        outcome.candidates.set(r, candidates);
        outcome.silenced.set(r, silenced);
      }
    }
    return outcome;
  };

  const settings = () => ({
    tauP: recorded.tau_p[at("tau").value][0],
    lnTau: recorded.tau_p[at("tau").value][1],
    q: Number(at("q").value),
    select: at("select").value,
    over: at("over").value,
  });

  let outcome = null;
  const isCandidate = (r, t) => state.whatIf ? outcome.candidates.get(r)[t] : r.is_candidate[t];
  const fate = (r, t) => {
    const silenced = state.whatIf ? outcome.silenced.get(r)[t] : r.silenced_by[t] !== null;
    if (silenced) return "silenced";
    if (r.clipped[t]) return "clipped";
    return isCandidate(r, t) ? "candidate" : "kept";
  };

  const percent = (logp) => number(100 * Math.exp(logp)) + " %";
  const visible = (text) => text === "" ? "∅" : text.replace(/ /g, "␣").replace(/\n/g, "⏎").replace(/\t/g, "⇥");

  const description = (r, t) => {
    const lines = [
      "“" + visible(r.text[t]) + "”  " + fate(r, t) + (r.silenced_by[t] ? " (trained: silenced by " + r.silenced_by[t] + ")" : ""),
      "probability " + percent(r.logp[t]) + "   log-prob " + number(r.logp[t]),
      "entropy " + number(r.entropy[t]) + " nats   advantage " + number(r.advantage),
      "ratio " + number(r.ratio[t]) + (r.norm ? "   gradient norm " + number(r.norm[t]) : ""),
    ];
    const others = r.alternatives[t] || [];
    if (others.length) lines.push("likeliest: " + others.map(([text, logp]) => visible(text) + " " + percent(logp)).join("   "));
    return lines.join("\n");
  };

  const all = (of) => responses.flatMap((r) => r.logp.map((_, t) => of(r, t)));
  const norms = responses.every((r) => r.norm) ? all((r, t) => r.norm[t]) : null;
  const ends = {
    entropy: quantile(all((r, t) => r.entropy[t]), 0.99) || 1,
    norm: norms ? quantile(norms, 0.99) || 1 : 1,
    advantage: Math.max(1e-9, ...responses.map((r) => Math.abs(r.advantage))),
  };
  const tint = (series, part) => "color-mix(in srgb, var(--s" + series + ") " + Math.round(72 * Math.min(1, Math.max(0, part))) + "%, transparent)";
  const colors = {
    probability: (r, t) => tint(1, -r.logp[t] / Math.log(1e4)),
    entropy: (r, t) => tint(0, r.entropy[t] / ends.entropy),
    advantage: (r) => tint(r.advantage >= 0 ? 0 : 1, Math.abs(r.advantage) / ends.advantage),
    ratio: (r, t) => tint(r.ratio[t] >= 1 ? 0 : 1, Math.abs(Math.log(r.ratio[t])) / Math.log(1.28)),
    norm: (r, t) => r.norm ? tint(3, r.norm[t] / ends.norm) : "transparent",
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
      for (const [name, what] of [["silenced", "silenced"], ["candidate", "candidate, kept"], ["clipped", "clipped"], ["", "kept"]]) box.append(element("span", "t " + name, what));
      box.append(element("span", "", state.whatIf ? "fates under the what-if settings" : "fates as trained"));
    } else if (state.by === "probability") bar(tint(1, 0), "p = 1", "p ≤ 1e-4", tint(1, 1));
    else if (state.by === "entropy") bar(tint(0, 0), "0 nats", "≥ " + number(ends.entropy) + " nats", tint(0, 1));
    else if (state.by === "advantage") bar(tint(1, 1) + ", transparent", "−" + number(ends.advantage), "+" + number(ends.advantage), tint(0, 1));
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
  const sum = (values) => values.reduce((a, b) => a + b, 0);
  const orders = {
    recorded: () => 0,
    advantage: (a, b) => b.advantage - a.advantage,
    length: (a, b) => b.logp.length - a.logp.length,
    silenced: (a, b) => nSilenced(b) - nSilenced(a),
    improbable: (a, b) => Math.min(0, ...a.logp) - Math.min(0, ...b.logp),
    entropy: (a, b) => sum(b.entropy) / (b.entropy.length || 1) - sum(a.entropy) / (a.entropy.length || 1),
  };

  const card = (r, idx, filtering) => {
    const box = element("article");
    const head = element("h3", "", r.problem + " #" + r.sample);
    const verdict = r.verdict.replace("_", " ");
    head.append(element("span", r.verdict === "right" ? "right" : "wrong", verdict));
    head.append(element("span", "", "A " + (r.advantage >= 0 ? "+" : "−") + number(Math.abs(r.advantage))));
    head.append(element("span", "", r.logp.length + " tokens" + (r.finish.kind === "length_limit" ? ", cut by the length limit" : "")));
    head.append(element("span", "", nSilenced(r) + " silenced"));
    box.append(head, element("p", "prompt", r.prompt + "   [reference " + r.reference + "]"));
    const line = element("div", "tokens");
    const given = new Map(r.given || []);
    const appendGiven = (t) => {
      if (given.has(t)) line.append(element("span", "given", given.get(t)));
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
    box.append(line);
    return box;
  };

  const draw = () => {
    const settingsNow = settings();
    outcome = decide(settingsNow);
    at("tau-now").textContent = number(settingsNow.tauP);
    at("q-now").textContent = settingsNow.q.toFixed(2);
    const trained = { nSilenced: sum(responses.map((r) => r.silenced_by.filter((by) => by !== null).length)) };
    const tauH = outcome.tauH.map((tau) => number(tau)).join(", ") || "none";
    const counts = at("counts");
    counts.dataset.tokens = outcome.nTokens;
    counts.dataset.candidates = outcome.nCandidates;
    counts.dataset.silenced = outcome.nSilenced;
    counts.textContent = "These settings: " + outcome.nCandidates + " candidates, " + outcome.nSilenced + " silenced of " + outcome.nTokens
      + " tokens; τh = " + tauH + (outcome.tauH.length ? " nats" : "") + ". As trained: " + trained.nSilenced + " silenced among these.";
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
    const nFound = filtering ? sum(shown.map(([r]) => r.logp.filter((_, t) => matches(r, t)).length)) : outcome.nTokens;
    at("found").textContent = nFound + " tokens in " + shown.length + " of " + responses.length + " responses";
    legend();
  };

  at("sort").value = sort;
  const own = recorded.settings;
  const reset = () => {
    at("tau").max = recorded.tau_p.length - 1;
    at("tau").value = recorded.tau_p.findIndex(([tau]) => tau === own.tau_p);
    at("q").value = own.q;
    at("select").value = own.select === "random" ? "low_entropy" : own.select;
    at("over").value = own.over;
    state.whatIf = false;
    draw();
  };

  const nRecorded = sum(responses.map((r) => r.logp.length));
  const nUpdates = new Set(responses.map((r) => r.update)).size;
  at("scope").textContent = "The quantile τh is taken over the " + (nUpdates > 1 ? "recorded responses of each of " + nUpdates + " mini-batches" : "recorded responses")
    + " of step " + recorded.step + ": " + nRecorded + (recorded.n_step_tokens ? " of the step's " + recorded.n_step_tokens : "") + " tokens. "
    + (recorded.n_step_tokens === nRecorded ? "Every token of the step is recorded, so these are the counts of training. "
      : "Training took it over whole mini-batches, so its counts can differ: a part of the step is recorded; record.responses asks for more. ")
    + (own.in_force ? "" : "This run had no S2T mask; the sliders start at the published settings. ")
    + (own.select === "random" ? "This run drew its candidates at random; a page cannot draw again. " : "")
    + (own.signals === "behavior" ? "This run decided by the behavior policy's signals; here the current policy's are used. " : "");

  for (const id of ["by", "only", "sort"]) at(id).addEventListener("change", () => { state[id] = at(id).value; state.budget = MAX_TOKENS; draw(); });
  at("find").addEventListener("input", () => { state.find = at("find").value.toLowerCase(); state.budget = MAX_TOKENS; draw(); });
  for (const id of ["tau", "q", "select", "over"]) at(id).addEventListener("input", () => { state.whatIf = true; draw(); });
  at("reset").addEventListener("click", reset);
  at("more").addEventListener("click", () => { state.budget += MAX_TOKENS; draw(); });
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
