// Keeps an open page current, counts leases down between two events, and opens forms in place.
// Without it every page and every form still works.
"use strict";

const live = document.getElementById("live");
const pulse = document.getElementById("pulse");
const trouble = document.getElementById("trouble");
const modal = document.getElementById("modal");

// --- counting down -----------------------------------------------------------------------------

// When the figures on the page were true, on this page's own clock.
let stamp = performance.now();

function words(left) {
  if (left <= 0) return "overdue";
  if (left < 100) return left.toFixed(1) + " s";
  if (left < 7200) return Math.floor(left / 60) + " min";
  return Math.floor(left / 3600) + " h";
}

function tick() {
  const gone = (performance.now() - stamp) / 1000;
  for (const time of document.querySelectorAll("time[data-left]")) {
    const term = Number(time.dataset.term);
    const left = Math.max(0, Number(time.dataset.left) - gone);
    const text = words(left);
    if (time.textContent !== text) time.textContent = text;
    const bar = time.previousElementSibling;
    if (bar) bar.value = left;
    const share = term > 0 ? left / term : 0;
    const row = time.closest(".is-well, .is-late, .is-silent");
    if (row) {
      row.classList.toggle("is-well", share >= 1 / 2);
      row.classList.toggle("is-late", share < 1 / 2 && share >= 1 / 6);
      row.classList.toggle("is-silent", share < 1 / 6);
      const margin = row.querySelector("[data-margin]");
      if (margin) margin.textContent = (share * 100).toFixed(share > 0 && share < 1 ? 1 : 0) + " %";
    }
  }
}

// --- keeping current ---------------------------------------------------------------------------

// Makes `old` look like `fresh` and keeps what is the same: focus, selection and scrolling survive.
function morph(old, fresh) {
  if (old.nodeType !== fresh.nodeType || old.nodeName !== fresh.nodeName) {
    old.replaceWith(fresh);
    return;
  }
  if (old.nodeType !== Node.ELEMENT_NODE) {
    if (old.nodeValue !== fresh.nodeValue) old.nodeValue = fresh.nodeValue;
    return;
  }
  for (const { name } of [...old.attributes]) {
    if (!fresh.hasAttribute(name)) old.removeAttribute(name);
  }
  for (const { name, value } of [...fresh.attributes]) {
    if (old.getAttribute(name) !== value) old.setAttribute(name, value);
  }
  const keyed = new Map();
  for (const child of old.children) {
    if (child.dataset && child.dataset.key) keyed.set(child.dataset.key, child);
  }
  let at = old.firstChild;
  for (const child of [...fresh.childNodes]) {
    const key = child.dataset && child.dataset.key;
    const known = key ? keyed.get(key) : null;
    if (known) {
      if (known !== at) old.insertBefore(known, at);
      else at = at.nextSibling;
      keyed.delete(key);
      morph(known, child);
    } else if (at && !key && !(at.dataset && at.dataset.key)) {
      const next = at.nextSibling;
      morph(at, child);
      at = next;
    } else {
      old.insertBefore(child, at);
    }
  }
  while (at) {
    const next = at.nextSibling;
    at.remove();
    at = next;
  }
}

let source = null;
let paused = false;
let retry = 0;

function state(name, text) {
  pulse.dataset.state = name;
  pulse.querySelector("span").textContent = text;
  pulse.setAttribute("aria-pressed", String(paused));
  pulse.title = paused ? "Keep this page current" : "Stop keeping this page current";
}

function say(text) {
  trouble.textContent = text || "";
  trouble.hidden = !text;
}

function disconnect() {
  clearTimeout(retry);
  if (source) source.close();
  source = null;
}

function connect(again) {
  disconnect();
  if (!live || paused || document.hidden) return;
  const opened = new EventSource(location.href);
  source = opened;
  if (!again) state("waiting", "Connecting");
  opened.addEventListener("open", () => state("on", "Live"));
  opened.addEventListener("live", (event) => {
    const fresh = document.createElement("template");
    fresh.innerHTML = event.data;
    const around = live.cloneNode(false);
    around.append(fresh.content);
    morph(live, around);
    stamp = performance.now();
    live.dataset.updates = String(Number(live.dataset.updates || 0) + 1);
    say("");
    state("on", "Live");
    tick();
  });
  opened.addEventListener("trouble", (event) => say(event.data));
  opened.addEventListener("gone", (event) => {
    say(event.data);
    disconnect();
    state("off", "Gone");
  });
  // This server would wait for an open stream before it ends: it says when to ask for the next one.
  opened.addEventListener("again", (event) => {
    disconnect();
    retry = setTimeout(connect, Number(event.data), true);
  });
  opened.addEventListener("error", () => {
    state("waiting", "Reconnecting");
    // After an answer that is no stream the browser gives up; we do not.
    if (opened.readyState === EventSource.CLOSED) {
      clearTimeout(retry);
      retry = setTimeout(connect, 2000);
    }
  });
}

if (live) {
  pulse.hidden = false;
  pulse.addEventListener("click", () => {
    paused = !paused;
    if (paused) {
      disconnect();
      state("off", "Paused");
    } else {
      connect();
    }
  });
  // Nobody looks: nobody needs to be told.
  document.addEventListener("visibilitychange", () => {
    if (document.hidden) {
      disconnect();
      if (!paused) state("off", "Paused");
    } else {
      connect();
    }
  });
  window.addEventListener("pagehide", disconnect);
  window.addEventListener("pageshow", (event) => event.persisted && connect());
  connect();
  setInterval(() => document.hidden || tick(), 100);
}

// --- forms in place ----------------------------------------------------------------------------

document.addEventListener("click", async (event) => {
  const link = event.target.closest("a");
  if (!link || event.metaKey || event.ctrlKey || event.shiftKey || event.button) return;
  if (link.hasAttribute("data-close") && modal.open) {
    event.preventDefault();
    modal.close();
    return;
  }
  if (!link.hasAttribute("data-modal")) return;
  event.preventDefault();
  try {
    const answer = await fetch(link.href, { headers: { Accept: "text/html" } });
    const page = new DOMParser().parseFromString(await answer.text(), "text/html");
    const form = page.querySelector("form.confirm");
    if (!form) throw new Error("no form");
    modal.replaceChildren(document.adoptNode(form));
    modal.showModal();
    modal.querySelector("input[name=reason]").focus();
  } catch {
    location.href = link.href;
  }
});

// What a command did is said once: reloading does not say it again.
if (location.search.includes("done=")) {
  const address = new URL(location.href);
  for (const name of ["done", "n", "skipped"]) address.searchParams.delete(name);
  history.replaceState(null, "", address);
}

// --- theme and keys ----------------------------------------------------------------------------

const theme = document.getElementById("theme");
const root = document.documentElement;
const dark = () =>
  root.dataset.theme === "auto"
    ? matchMedia("(prefers-color-scheme: dark)").matches
    : root.dataset.theme === "dark";

function label() {
  theme.textContent = dark() ? "Light" : "Dark";
  theme.setAttribute("aria-label", "Switch to the " + theme.textContent.toLowerCase() + " theme");
}

theme.hidden = false;
label();
theme.addEventListener("click", () => {
  root.dataset.theme = dark() ? "light" : "dark";
  document.cookie = "leasehold_theme=" + root.dataset.theme + "; path=/; max-age=31536000; samesite=strict";
  label();
});

// g then a letter leads to a screen; / to the filter, or where there is none to the search for a job.
let leading = 0;
document.addEventListener("keydown", (event) => {
  if (event.target.closest("input, textarea, dialog") || event.metaKey || event.ctrlKey || event.altKey) return;
  if (event.key === "/") {
    const field = document.querySelector(".filter input") || document.querySelector(".find input");
    if (field) {
      event.preventDefault();
      field.focus();
    }
  } else if (event.key === "g") {
    leading = performance.now();
  } else if (performance.now() - leading < 1500) {
    const link = document.querySelector('[data-key-go="' + CSS.escape(event.key) + '"]');
    leading = 0;
    if (link) link.click();
  }
});
