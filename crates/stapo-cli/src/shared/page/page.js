"use strict";
(() => {
  const root = document.documentElement;
  const button = document.getElementById("theme");
  const themes = ["system", "light", "dark"];
  // Browsers may deny localStorage to a page opened from a file; the page then starts with the system's theme.
  const remembered = () => { try { return localStorage.getItem("stapo-theme"); } catch { return null; } };
  const remember = (theme) => { try { localStorage.setItem("stapo-theme", theme); } catch { /* denied */ } };
  const show = (theme) => {
    if (theme === "system") root.removeAttribute("data-theme"); else root.setAttribute("data-theme", theme);
    button.textContent = "theme: " + theme;
    button.dataset.now = theme;
  };
  show(themes.includes(remembered()) ? remembered() : "system");
  button.addEventListener("click", () => {
    const next = themes[(themes.indexOf(button.dataset.now) + 1) % themes.length];
    show(next);
    remember(next);
  });

  const tip = document.getElementById("tip");
  const place = (event) => {
    const hovered = event.target.closest ? event.target.closest("[data-t]") : null;
    if (!hovered) { tip.hidden = true; return; }
    tip.textContent = hovered.dataset.t;
    tip.hidden = false;
    const { width, height } = tip.getBoundingClientRect();
    const left = Math.min(event.clientX + 14, innerWidth - width - 8);
    const above = event.clientY - height - 12;
    tip.style.left = Math.max(8, left) + "px";
    tip.style.top = (above > 4 ? above : event.clientY + 18) + "px";
  };
  document.addEventListener("pointermove", place);
  document.addEventListener("pointerdown", place);
  document.addEventListener("scroll", () => { tip.hidden = true; }, { passive: true });
})();
