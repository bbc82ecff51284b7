// Live updates and plots. Every page works without this file.
"use strict";

const whole = document.getElementById("whole");

// The part that the server replaces. The whole page is replaced as long as it lacks an answer.
const livePart = () => document.querySelector("[data-live]");
const isPending = () => document.querySelector("[data-pending]") !== null;

// Between two times below a plot, in seconds: whole ones, since labels show no others.
const STEPS = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 21600, 43200, 86400];

// hh:mm:ss, UTC.
function clockTime(seconds) {
  return new Date(seconds * 1000).toISOString().slice(11, 19);
}

// Draws what the server has put into data-plot: [seconds since 1970, values].
function drawPlots(root) {
  for (const place of root.querySelectorAll("[data-plot]")) {
    const data = JSON.parse(place.dataset.plot);
    if (data[0].length < 2) continue;
    const style = getComputedStyle(document.documentElement);
    const [line, grid, text] = ["--plot", "--line", "--quiet"].map((name) => style.getPropertyValue(name).trim());
    const axis = { stroke: text, grid: { stroke: grid, width: 1 }, ticks: { stroke: grid, width: 1 } };
    new uPlot(
      {
        width: Math.max(200, place.clientWidth),
        height: 150,
        legend: { show: false },
        cursor: { show: false },
        tzDate: (seconds) => uPlot.tzDate(new Date(seconds * 1000), "Etc/UTC"), // as all times on the pages
        scales: { y: { range: (plot, low, high) => [0, Math.max(1, high * 1.1)] } },
        axes: [
          { ...axis, values: (plot, times) => times.map(clockTime), space: 90, incrs: STEPS },
          { ...axis, size: 64 },
        ],
        series: [{}, { stroke: line, width: 2, points: { show: false } }],
      },
      data,
      place,
    );
    place.setAttribute("role", "img");
    place.setAttribute("aria-label", place.dataset.label + ", now " + data[1][data[1].length - 1]);
  }
}

// Whether a person has changed a field. A list without a preset shows its first option.
function isChanged(field) {
  if (field.matches("select")) {
    const options = Array.from(field.options);
    const preset = options.some((each) => each.defaultSelected);
    return options.some((each, index) => each.selected !== (preset ? each.defaultSelected : index === 0));
  }
  if (field.matches("[type=checkbox], [type=radio]")) return field.checked !== field.defaultChecked;
  return field.value !== field.defaultValue;
}

// A person who types, presses a button, or has something selected is not disturbed.
function isBusy(root) {
  const selected = document.getSelection();
  if (selected && !selected.isCollapsed && root.contains(selected.anchorNode)) return true;
  if (root.querySelector(":active") !== null) return true;
  const focused = document.activeElement;
  // The field in which a page begins has the focus without anybody's doing; `replace` gives it back.
  return root.contains(focused) && focused.matches("input:not([autofocus]), select, textarea");
}

// Nor does the whole page take away what a person has opened or filled in.
function isInUse() {
  const fields = Array.from(whole.querySelectorAll("input, select, textarea"));
  return isBusy(whole) || whole.querySelector("details[open]") !== null || fields.some(isChanged);
}

// What tells a link or a button from the others of the page: where it leads, or what its form sends.
function keyOf(element) {
  const sent = element.form ? element.form.action + new URLSearchParams(new FormData(element.form)) : "";
  return [element.tagName, element.getAttribute("href"), sent, element.textContent].join(" ");
}

// The link or button that had the focus when an update took it away: if it returns, it gets the focus back.
let missed = null;
for (const deed of ["pointerdown", "keydown"]) document.addEventListener(deed, () => (missed = null), true);

function replace(root, html) {
  const active = document.activeElement;
  const isInside = root.contains(active);
  const focused = isInside ? keyOf(active) : active === document.body ? missed : null;
  const atStart = isInside && active.matches("[autofocus]");
  const scrolled = Array.from(root.querySelectorAll(".wide"), (each) => each.scrollLeft);
  root.innerHTML = html;
  root.querySelectorAll(".wide").forEach((each, index) => (each.scrollLeft = scrolled[index] || 0));
  missed = null;
  if (focused !== null) {
    const again = Array.from(root.querySelectorAll("a, button")).find((each) => keyOf(each) === focused);
    if (again) again.focus({ preventScroll: true });
    else missed = focused;
  }
  const start = atStart ? root.querySelector("[autofocus]") : null;
  if (start) start.focus({ preventScroll: true });
  drawPlots(root);
}

// `updates`: whether the page has a live part; if not, its answers are waited for, and that is all.
function follow(updates) {
  const lost = document.getElementById("lost");
  const path = encodeURIComponent(location.pathname + location.search);
  let source = null;
  let late = null; // a whole page that is not shown yet
  let trying = 0;
  const showWhole = () => {
    clearTimeout(trying);
    if (late === null) return;
    if (isInUse()) {
      trying = setTimeout(showWhole, 1000);
      return;
    }
    replace(whole, late);
    late = null;
    if (!updates && !isPending()) source.close();
  };
  const reload = () => (isInUse() ? setTimeout(reload, 2000) : location.reload());
  // `again`: the page was hidden meanwhile.
  const open = (again) => {
    source = new EventSource("/live?path=" + path + (isPending() ? "&whole=1" : ""));
    source.onopen = () => (lost.hidden = true);
    source.onerror = () => {
      lost.hidden = document.hidden;
      // Refused: the session has ended, or too many pages are open. Answers that are missing come with the page itself.
      if (source.readyState === EventSource.CLOSED && (again || isPending())) setTimeout(reload, 2000);
    };
    source.onmessage = (event) => {
      lost.hidden = true;
      showWhole();
      if (updates && !isBusy(livePart())) replace(livePart(), event.data);
    };
    source.addEventListener("whole", (event) => {
      lost.hidden = true;
      late = event.data;
      showWhole();
    });
    source.addEventListener("over", () => location.reload());
  };
  open(false);
  document.addEventListener("visibilitychange", () => {
    if (document.hidden) source.close();
    else if (source.readyState === EventSource.CLOSED && (updates || isPending())) open(true);
  });
  window.addEventListener("pagehide", () => source.close());
}

drawPlots(document);
// Records are read anew only where a person has asked for it.
const isRecords = /\/messages$|^\/audit$/.test(location.pathname);
const wanted = !isRecords || new URLSearchParams(location.search).get("live") === "1";
const updates = whole !== null && wanted && livePart().children.length > 0;
if (updates || isPending()) follow(updates);
