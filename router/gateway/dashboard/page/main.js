// Tabs, the key, and the loop that asks once a second for what is looked at.

import { Failure, ask, key } from "./api.js";
import { $, text } from "./dom.js";
import { Overview } from "./overview.js";
import { Requests } from "./requests.js";
import { Tree } from "./tree.js";

const EVERY_MS = 1000;
const views = { overview: new Overview(show), cache: new Tree(), requests: new Requests() };
const tabs = [...document.querySelectorAll("[role=tab]")];
let shown = "overview";
let round = 0;
let failures = 0;

function state(kind, words) {
  $("status").dataset.kind = kind;
  text($("status"), words);
  document.body.dataset.state = kind;
}

function show(name, argument) {
  shown = name;
  for (const tab of tabs) {
    const mine = tab.getAttribute("aria-controls") === name;
    tab.setAttribute("aria-selected", mine);
    tab.tabIndex = mine ? 0 : -1;
    $(tab.getAttribute("aria-controls")).hidden = !mine || !$("gate").hidden;
  }
  if (argument !== undefined) views[name].open(argument);
  history.replaceState(null, "", `#${name}`);
  again();
}

function gate(words) {
  $("gate").hidden = false;
  $(shown).hidden = true;
  text($("gate-error"), words);
  $("forget").hidden = true;
  state("locked", "needs a key");
  $("key").focus();
}

async function once(mine) {
  try {
    await views[shown].refresh(ask);
    if (mine !== round) return;
    failures = 0;
    state("live", "live");
    $("forget").hidden = !key.get();
  } catch (error) {
    if (mine !== round) return;
    if (!(error instanceof Failure)) console.error(error);
    if (error.status === 401) {
      const had = key.get();
      key.forget();
      gate(had ? "That key is not known here." : "");
      return;
    }
    failures += 1;
    state("lost", error.status ? error.message : `reconnecting (${failures})`);
  }
  setTimeout(() => mine === round && !document.hidden && once(mine), EVERY_MS * Math.min(5, 1 + failures));
}

// Ask now, and only for what is shown now.
function again() {
  round += 1;
  if ($("gate").hidden) once(round);
}

for (const [place, tab] of tabs.entries()) {
  tab.addEventListener("click", () => show(tab.getAttribute("aria-controls")));
  tab.addEventListener("keydown", (event) => {
    const to = { ArrowRight: place + 1, ArrowLeft: place - 1, Home: 0, End: -1 }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    const next = tabs.at(to % tabs.length);
    next.focus();
    next.click();
  });
}

$("gate-form").addEventListener("submit", (event) => {
  event.preventDefault();
  key.set($("key").value.trim());
  $("key").value = "";
  text($("gate-error"), "");
  $("gate").hidden = true;
  show(shown);
});

$("forget").addEventListener("click", () => {
  key.forget();
  location.reload();
});

document.addEventListener("visibilitychange", () => !document.hidden && again());
show(Object.keys(views).find((name) => location.hash === `#${name}`) ?? "overview");
