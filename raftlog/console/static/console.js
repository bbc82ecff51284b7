// Live updates and plots. Every page works without this file.
"use strict";

const live = document.querySelector("[data-live]");

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
        axes: [{ ...axis, values: (plot, times) => times.map(clockTime), space: 90 }, { ...axis, size: 64 }],
        series: [{}, { stroke: line, width: 2, points: { show: false } }],
      },
      data,
      place,
    );
    place.setAttribute("role", "img");
    place.setAttribute("aria-label", place.dataset.label + ", now " + data[1][data[1].length - 1]);
  }
}

// A person who types, has something selected, or scrolls a table sideways is not disturbed.
function isBusy() {
  const selected = document.getSelection();
  if (selected && !selected.isCollapsed && live.contains(selected.anchorNode)) return true;
  const focused = document.activeElement;
  return live.contains(focused) && focused.matches("input, select, textarea");
}

function replace(html) {
  const focused = live.contains(document.activeElement) ? document.activeElement.getAttribute("href") : null;
  const scrolled = Array.from(live.querySelectorAll(".wide"), (each) => each.scrollLeft);
  live.innerHTML = html;
  live.querySelectorAll(".wide").forEach((each, index) => (each.scrollLeft = scrolled[index] || 0));
  if (focused !== null) {
    const again = Array.from(live.querySelectorAll("a")).find((each) => each.getAttribute("href") === focused);
    if (again) again.focus({ preventScroll: true });
  }
  drawPlots(live);
}

function follow() {
  const lost = document.getElementById("lost");
  const source = new EventSource("/live?path=" + encodeURIComponent(location.pathname + location.search));
  source.onopen = () => (lost.hidden = true);
  source.onerror = () => (lost.hidden = document.hidden);
  source.onmessage = (event) => {
    lost.hidden = true;
    if (!isBusy()) replace(event.data);
  };
  source.addEventListener("over", () => location.reload());
  document.addEventListener("visibilitychange", () => {
    if (document.hidden) source.close();
    else if (source.readyState === EventSource.CLOSED) location.reload();
  });
  window.addEventListener("pagehide", () => source.close());
}

drawPlots(document);
// Records are read anew only where a person has asked for it.
const isRecords = /\/messages$|^\/audit$/.test(location.pathname);
if (live && live.children.length && (!isRecords || new URLSearchParams(location.search).get("live") === "1")) follow();
