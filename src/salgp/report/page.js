"use strict";
(() => {
  const byId = (id) => document.getElementById(id);
  const points = JSON.parse(byId("points").textContent);
  const slider = byId("error");

  const show = () => {
    const p = points[Number(slider.value)];
    for (const place of document.querySelectorAll("[data-out]")) place.textContent = p[place.dataset.out];
    byId("human-share").style.width = p.share + "%";
    slider.setAttribute("aria-valuetext", p.error);
    for (const end of ["y1", "y2"]) byId("limit").setAttribute(end, p.y);
    for (const [dot, x] of [["dot-before", p.xb], ["dot-after", p.xa]]) {
      byId(dot).setAttribute("cx", x);
      byId(dot).setAttribute("cy", p.y);
    }
  };
  slider.addEventListener("input", show);
  slider.parentElement.hidden = false;

  const open = () => {
    const target = location.hash && document.querySelector(location.hash + " details");
    if (target) target.open = true;
  };
  addEventListener("hashchange", open);
  open();

  const links = [...document.querySelectorAll("nav a")];
  const mark = () => {
    const reached = (link) => document.querySelector(link.hash).getBoundingClientRect().top <= innerHeight / 4;
    const current = links.filter(reached).at(-1) || links[0];
    for (const link of links) link.toggleAttribute("aria-current", link === current);
  };
  addEventListener("scroll", mark, { passive: true });
  mark();

  addEventListener("beforeprint", () => document.querySelectorAll("details").forEach((part) => (part.open = true)));

  const value = (row, column) => {
    const cell = row.cells[column];
    return cell.dataset.value !== undefined ? Number(cell.dataset.value) : cell.textContent.trim();
  };
  const sort = (table, heading, column) => {
    const up = heading.getAttribute("aria-sort") !== "ascending";
    for (const other of heading.parentElement.cells) other.removeAttribute("aria-sort");
    heading.setAttribute("aria-sort", up ? "ascending" : "descending");
    const body = table.tBodies[0];
    const compare = (a, b) => (typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b), undefined, { numeric: true }));
    const rows = [...body.rows].sort((a, b) => (up ? 1 : -1) * compare(value(a, column), value(b, column)));
    body.append(...rows);
  };
  for (const table of document.querySelectorAll("table.sortable")) {
    [...table.tHead.rows[0].cells].forEach((heading, column) => {
      if (heading.classList.contains("nosort")) return;
      const button = document.createElement("button");
      button.type = "button";
      button.title = "sort";
      button.textContent = heading.textContent;
      heading.replaceChildren(button);
      button.addEventListener("click", () => sort(table, heading, column));
    });
  }
})();
