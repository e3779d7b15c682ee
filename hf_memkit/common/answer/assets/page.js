"use strict";
// A button that copies beside all lines to copy.
for (const code of document.querySelectorAll(".code")) {
  const button = document.createElement("button");
  button.type = "button";
  button.textContent = "Copy";
  button.addEventListener("click", async () => {
    const lines = code.querySelector("pre");
    try {
      await navigator.clipboard.writeText(lines.textContent);
    } catch { // an older browser, or a page that is not trusted with the clipboard
      getSelection().selectAllChildren(lines);
      document.execCommand("copy");
    }
    button.textContent = "Copied";
    setTimeout(() => { button.textContent = "Copy"; }, 2000);
  });
  code.prepend(button);
}
// Draws the charts that the page's data describe; colours named var(--x) are those of the style sheet at that moment.
(async () => {
  const held = document.getElementById("plotly");
  if (!held) return;
  // Plotly stands in the page compressed. The page's policy allows its text, and no other, to run.
  const bytes = Uint8Array.from(atob(held.textContent), (letter) => letter.charCodeAt(0));
  const plain = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  const library = document.createElement("script");
  library.textContent = await new Response(plain).text();
  held.replaceWith(library);
  const charts = JSON.parse(document.getElementById("charts").textContent);
  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const resolved = (value) => {
    if (typeof value === "string" && value.startsWith("var(")) return colour(value.slice(4, -1));
    if (Array.isArray(value)) return value.every((x) => typeof x !== "object") ? value : value.map(resolved);
    if (value && typeof value === "object")
      return Object.fromEntries(Object.entries(value).map(([name, inner]) => [name, resolved(inner)]));
    return value;
  };
  const axis = (title) => ({
    title: { text: title, font: { size: 13 }, standoff: 8 }, automargin: true, gridcolor: colour("--rule"),
    linecolor: colour("--rule"), zerolinecolor: colour("--rule"), tickfont: { size: 12 },
  });
  const draw = (name) => {
    const place = document.getElementById("chart-" + name);
    if (!place) return;
    const chart = charts[name];
    const narrow = window.innerWidth < 600;
    const layout = {
      font: { color: colour("--ink"), family: "system-ui, sans-serif", size: 13 },
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", showlegend: false, autosize: true,
      margin: { l: 8, r: narrow ? 8 : 16, t: 12, b: 8 }, hovermode: chart.hovermode,
      hoverlabel: { bgcolor: colour("--panel"), bordercolor: colour("--rule"), font: { color: colour("--ink") } },
      xaxis: { ...axis(chart.x), ...(name === "ranks" ? { type: "category" } : {}) },
      yaxis: { ...axis(chart.y), rangemode: "tozero" },
      dragmode: narrow ? false : "zoom", // a finger scrolls the page
    };
    Plotly.react(place, resolved(chart.traces), layout, {
      responsive: true, displaylogo: false, displayModeBar: narrow ? false : "hover",
      modeBarButtonsToRemove: ["select2d", "lasso2d", "autoScale2d"],
    });
  };
  const drawAll = () => Object.keys(charts).forEach(draw);
  drawAll();
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);
  // On paper everything is light.
  addEventListener("beforeprint", () => { document.documentElement.classList.add("light"); drawAll(); });
  addEventListener("afterprint", () => { document.documentElement.classList.remove("light"); drawAll(); });
})();
