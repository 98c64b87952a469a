"use strict";
// The application: views by the hash of the address, questions to the server, and the stream of what changed.
stapo.app = (() => {
  const { element } = stapo;
  const at = (id) => document.getElementById(id);
  const rows = new Map();
  const views = {};
  let version = 0;
  let current = null;

  const query = (pairs) => {
    const found = new URLSearchParams();
    for (const [name, value] of Object.entries(pairs)) {
      for (const one of Array.isArray(value) ? value : [value])
        if (one !== null && one !== undefined && one !== "") found.append(name, one);
    }
    return found.toString();
  };
  const ask = async (path, pairs = {}) => {
    const response = await fetch(path + "?" + query(pairs));
    if (!response.ok) throw new Error((await response.text()).trim());
    return response.json();
  };
  const link = (view, pairs = {}) => "#/" + view + (Object.keys(pairs).length ? "?" + query(pairs) : "");
  const anchor = (text, view, pairs, className) => {
    const made = element("a", className, text);
    made.href = link(view, pairs);
    return made;
  };

  // What a view shows is in the address, so that a link restores it.
  const address = () => {
    const [path, text] = location.hash.replace(/^#\/?/, "").split("?");
    return { view: path || "runs", params: new URLSearchParams(text || "") };
  };
  const remember = (pairs) => {
    const { view, params } = address();
    for (const [name, value] of Object.entries(pairs)) {
      params.delete(name);
      for (const one of Array.isArray(value) ? value : [value])
        if (one !== null && one !== undefined && one !== "") params.append(name, one);
    }
    const text = params.toString();
    history.replaceState(null, "", "#/" + view + (text ? "?" + text : ""));
  };

  const complain = (error) => {
    const box = element("p", "problem", error.message || String(error));
    at("view").append(box);
  };
  const open = async () => {
    stapo.hide();
    if (current?.leave) current.leave();
    const { view, params } = address();
    const make = views[view] || views.runs;
    const root = element("div", "view-" + view);
    at("view").replaceChildren(root);
    for (const tab of document.querySelectorAll("#tabs a"))
      tab.toggleAttribute("aria-current", tab.dataset.view === view);
    document.title = (params.get("run") || "runs") + " – STAPO";
    // A view receives what changed while it was made afterwards.
    const missed = new Set();
    const mine = { update: (changed) => changed.forEach((id) => missed.add(id)) };
    current = mine;
    try {
      const made = await make(root, params);
      if (current !== mine) {
        if (made?.leave) made.leave();
        return;
      }
      current = made || {};
      if (missed.size && current.update) current.update(missed);
    } catch (error) {
      if (current === mine) complain(error);
    }
  };

  // The stream is closed while the page is hidden: browsers allow six connections per server.
  let source = null;
  const state = (text, isLost) => {
    at("live").textContent = text;
    at("live").classList.toggle("lost", isLost);
  };
  const take = (news) => {
    version = news.version;
    for (const row of news.rows) rows.set(row.id, row);
    for (const id of news.gone) rows.delete(id);
    const changed = new Set([...news.rows.map((row) => row.id), ...news.gone]);
    if (current?.update) current.update(changed);
  };
  const reload = async () => {
    const news = await ask("/api/runs");
    rows.clear();
    take(news);
  };
  const listen = () => {
    if (source) source.close();
    source = new EventSource("/stream?since=" + version);
    let wasLost = false;
    source.addEventListener("open", () => {
      state("live", false);
      if (wasLost) reload().catch(() => {});
      wasLost = false;
    });
    source.addEventListener("error", () => {
      wasLost = true;
      state("no connection, trying again", true);
    });
    source.addEventListener("runs", (event) => take(JSON.parse(event.data)));
  };
  const visible = () => {
    if (document.hidden) {
      if (source) source.close();
      source = null;
      state("paused", false);
    } else if (!source) listen();
  };

  const start = async () => {
    try {
      await reload();
    } catch (error) {
      complain(error);
    }
    addEventListener("hashchange", open);
    document.addEventListener("visibilitychange", visible);
    visible();
    await open();
  };

  // Keys: the first letter of a view opens it, / goes to the search field, t changes the theme, ? tells the keys.
  const isTyping = (event) => event.target.closest?.("input, select, textarea");
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.key === "Escape") {
      at("keys").hidden = true;
      if (isTyping(event)) event.target.blur();
      return;
    }
    if (isTyping(event)) return;
    const chosen = [...document.querySelectorAll("#tabs a")].find((tab) => tab.dataset.letter === event.key);
    if (chosen) location.hash = chosen.getAttribute("href");
    else if (event.key === "t") stapo.nextTheme();
    else if (event.key === "?") at("keys").hidden = !at("keys").hidden;
    else if (event.key === "/" && document.querySelector("#view input[type=search]")) {
      event.preventDefault();
      document.querySelector("#view input[type=search]").focus();
    } else if (current?.key) current.key(event);
  });

  const duration = (seconds) => {
    if (seconds < 90) return Math.round(seconds) + " s";
    if (seconds < 5400) return Math.round(seconds / 60) + " min";
    if (seconds < 172800) return (seconds / 3600).toFixed(1) + " h";
    return (seconds / 86400).toFixed(1) + " days";
  };
  const badge = (row) => {
    const made = element("span", "badge " + row.status.kind, row.status.kind);
    if (row.status.text) made.dataset.t = row.status.text;
    return made;
  };

  return { rows, views, ask, link, anchor, address, remember, start, duration, badge, at };
})();
