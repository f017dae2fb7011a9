"use strict";
// Sort by a click on a heading, filter long tables, copy a table as Markdown or LaTeX, move the margin.
const key = (cell) => cell.dataset.n === undefined ? cell.textContent.trim() : Number(cell.dataset.n);
const compare = (a, b) => typeof a === "number" && typeof b === "number" ? a - b
  : typeof a === typeof b ? String(a).localeCompare(String(b), "en", { numeric: true })
  : typeof a === "number" ? -1 : 1;

function sort(table, heading) {
  const place = [...heading.parentNode.children].indexOf(heading);
  const up = heading.getAttribute("aria-sort") !== "ascending";
  for (const other of heading.parentNode.children) other.removeAttribute("aria-sort");
  heading.setAttribute("aria-sort", up ? "ascending" : "descending");
  const rows = [...table.tBodies[0].rows];
  rows.sort((a, b) => (up ? 1 : -1) * compare(key(a.cells[place]), key(b.cells[place])));
  table.tBodies[0].append(...rows);
}

const texts = (table) => [...table.rows].filter((row) => !row.hidden)
  .map((row) => [...row.cells].map((cell) => cell.textContent.trim()));

function markdown(table) {
  const [head, ...rows] = texts(table).map((row) => row.map((word) => word.replaceAll("|", "\\|")));
  const line = (words) => `| ${words.join(" | ")} |`;
  const rule = [...table.tHead.rows[0].cells].map((cell) => cell.className === "n" ? "---:" : "---");
  return [line(head), line(rule), ...rows.map(line)].join("\n") + "\n";
}

function latex(table) {
  const marks = { "\u2212": "$-$", "\u00b5": "$\\mu$", "\u03c3": "$\\sigma$", "\u00d7": "$\\times$", "\u00b1": "$\\pm$",
    "\\": "\\textbackslash{}", "~": "\\textasciitilde{}", "^": "\\textasciicircum{}", "\u2013": "--" };
  const safe = (word) => word.replace(/[\\~^\u2212\u00b5\u03c3\u00d7\u00b1\u2013]|[&%$#_{}]/g, (c) => marks[c] ?? `\\${c}`);
  const [head, ...rows] = texts(table).map((row) => `${row.map(safe).join(" & ")} \\\\`);
  const columns = [...table.tHead.rows[0].cells].map((cell) => cell.className === "n" ? "r" : "l").join("");
  return [`\\begin{tabular}{${columns}}`, "\\toprule", head, "\\midrule", ...rows, "\\bottomrule", "\\end{tabular}"].join("\n") + "\n";
}

async function copy(button, text) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    // A page opened as a file may not have the clipboard's interface.
    const area = document.createElement("textarea");
    area.value = text;
    document.body.append(area);
    area.select();
    document.execCommand("copy");
    area.remove();
  }
  button.textContent = "copied";
  setTimeout(() => { button.textContent = button.dataset.label; }, 1500);
}

function tools(box) {
  const table = box.querySelector("table");
  for (const heading of table.tHead.rows[0].cells) {
    heading.querySelector("button").addEventListener("click", () => sort(table, heading));
  }
  const bar = box.querySelector(".tools");
  for (const [label, form] of [["Markdown", markdown], ["LaTeX", latex]]) {
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = button.dataset.label = label;
    button.setAttribute("aria-label", `Copy the table as ${label}`);
    button.addEventListener("click", () => copy(button, form(table)));
    bar.append(button);
  }
  if (table.tBodies[0].rows.length < 12) return;
  const filter = document.createElement("input");
  filter.type = "search";
  filter.placeholder = "filter rows";
  filter.setAttribute("aria-label", "Show only rows that hold every word");
  filter.addEventListener("input", () => {
    const words = filter.value.toLowerCase().split(/\s+/);
    for (const row of table.tBodies[0].rows) {
      const said = row.textContent.toLowerCase();
      row.hidden = !words.every((word) => said.includes(word));
    }
  });
  bar.prepend(filter);
}

document.querySelectorAll(".data").forEach(tools);
// The verdict of connector_tax/artifacts/verdicts.py for another margin: what costs does not hang on it.
const margin = document.getElementById("margin");
margin.addEventListener("input", () => {
  for (const cell of document.querySelectorAll("[data-narrow]")) {
    const [lo, hi] = cell.dataset.narrow.split(" ").map(Number);
    const most = margin.value === "" ? Number(cell.dataset.margin) : margin.value / 100;
    const less = -most <= lo && hi <= most;
    const words = [cell.dataset.sign, less && `less than ${Math.round(1000 * most) / 10}%`].filter(Boolean);
    const said = words.join(", ") || "cannot tell";
    const score = cell.querySelector("b");
    if (!score) {
      cell.textContent = said;
      continue;
    }
    cell.className = less ? "less" : cell.dataset.sign || "unsure";
    const sign = { less: "●", costs: "▲", gains: "▼", unsure: "?" }[cell.className];
    score.textContent = `${sign} ${said}`;
  }
  for (const words of document.querySelectorAll(".planned")) words.hidden = margin.value === "";
});
// A link to a table in a folded part opens it.
const reveal = () => {
  const target = location.hash && document.getElementById(decodeURIComponent(location.hash.slice(1)));
  for (let part = target; part; part = part.parentElement) if (part.tagName === "DETAILS") part.open = true;
  if (target) target.scrollIntoView();
};
addEventListener("hashchange", reveal);
reveal();
