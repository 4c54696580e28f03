"use strict";
const prefix = location.origin + document.body.dataset.prefix, $ = name => document.getElementById(name);
const SVG = "http://www.w3.org/2000/svg";
const tones = new Map();
function tone(name) {  // a colour of the style sheet, light or dark
  if (!tones.has(name)) tones.set(name, getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim());
  return tones.get(name);
}
let by = "owner", last = null, chosen = null, hovered = null, cells = null;

function colourOf(name) {  // the same request keeps its colour for as long as it lives
  let hash = 0;
  for (const letter of name) hash = (hash * 31 + letter.charCodeAt(0)) >>> 0;
  return `hsl(${(hash * 92.7) % 150 + 175} 60% ${tone("request")})`;
}
function toneOf(state) { return tone(state === "HELD" ? "written" : state.toLowerCase().replaceAll("_", "-")); }
function age(steps) {
  const hue = 160 - Math.min(steps, 128) / 128 * 145;
  return `hsl(${hue} 60% 52%)`;
}
function colour(pages, page) {
  if (page < pages.null_pages) return tone("null");
  if (by === "state") return toneOf(pages.states[pages.state[page]]);
  if (by === "checked") return pages.checked[page] < 0 ? tone("free") : age(pages.step - pages.checked[page]);
  const owner = pages.owner[page];
  if (owner < 0) return tone(pages.states[pages.state[page]] === "QUARANTINED" ? "quarantined" : "free");
  return owner === 0 ? tone("shared") : colourOf(pages.owners[owner]);
}
function drawMap() {
  const pages = last.pages, count = pages.state.length, canvas = $("map"), ratio = window.devicePixelRatio || 1;
  const width = canvas.clientWidth, size = Math.max(5, Math.min(22, Math.floor(Math.sqrt(width * 330 / count))));
  const columns = Math.max(1, Math.floor(width / size)), rows = Math.ceil(count / columns);
  canvas.style.height = `${rows * size}px`;
  canvas.width = width * ratio; canvas.height = rows * size * ratio;
  const pen = canvas.getContext("2d"), gap = size > 8 ? 2 : 1;
  pen.scale(ratio, ratio);
  const damaged = new Set(last.findings.filter(finding => finding.slot >= 0).map(finding => finding.page));
  const request = last.requests.find(one => one.request_id === chosen);
  const own = request ? new Set(request.pages) : null;
  for (let page = 0; page < count; page++) {
    const x = page % columns * size, y = Math.floor(page / columns) * size;
    pen.globalAlpha = own && !own.has(page) ? .32 : 1;
    pen.fillStyle = colour(pages, page);
    pen.beginPath(); pen.roundRect(x, y, size - gap, size - gap, size > 8 ? 3 : 1); pen.fill();
    pen.globalAlpha = 1;
    if (damaged.has(page) || page === hovered) {
      pen.strokeStyle = damaged.has(page) ? tone("bad") : tone("ink"); pen.lineWidth = 3;
      pen.strokeRect(x + 1, y + 1, size - gap - 2, size - gap - 2);
    }
  }
  cells = { size, columns, count };
  drawLegend(damaged.size);
  describe();
}
function drawLegend(damaged) {
  const pages = last.pages, entries = [];
  if (by === "state") {
    const used = new Set(pages.state);
    pages.states.forEach((name, number) => used.has(number) && entries.push([toneOf(name), words(name)]));
  } else if (by === "checked") {
    entries.push([age(0), "looked at now"], [age(64), "64 steps ago"], [age(128), "128 or more"], [tone("free"), "nothing final there"]);
  } else {
    entries.push([tone("free"), "free"], [tone("quarantined"), "quarantined"], [tone("shared"), "shared"]);
    pages.owners.slice(1, 9).forEach(name => entries.push([colourOf(name), name]));
    if (pages.owners.length > 9) entries.push([tone("null"), `and ${pages.owners.length - 9} more requests`]);
  }
  if (damaged) entries.push([tone("bad"), "a finding named it"]);
  $("legend").replaceChildren(...entries.map(([fill, text]) => {
    const entry = node("span"), spot = node("i");
    spot.style.background = fill; entry.append(spot, text);
    return entry;
  }));
}
function describe() {
  const pages = last.pages;
  if (hovered === null || hovered >= pages.state.length) { $("page").textContent = "Point at a page, tap it, or use the arrow keys, to read it."; return; }
  const owner = pages.owner[hovered], checked = pages.checked[hovered], parts = [`page ${hovered}`];
  parts.push(`slots ${hovered * pages.page_size}..${(hovered + 1) * pages.page_size - 1}`);
  if (hovered < pages.null_pages) parts.push("padding");
  else {
    parts.push(words(pages.states[pages.state[hovered]]), owner < 0 ? "nobody's" : pages.owners[owner]);
    parts.push(`${pages.references[hovered]} rows`, `generation ${pages.generation[hovered]}`);
    parts.push(checked < 0 ? "nothing to check" : `all of it last known good at step ${checked}`);
  }
  $("page").textContent = parts.join("  ·  ");
}
function drawFigures() {
  const certificate = last.certificate;
  const figures = [
    [number(last.step), "steps"], [number(last.tokens), "tokens emitted"],
    [last.accepted_length.toFixed(2), "tokens per verify"],
    [number(last.requests.length), last.requests.length === 1 ? "request" : "requests"],
  ];
  if (certificate && certificate.forwards !== undefined) figures.push(
    [number(certificate.slots_checked), "slots checked"], [bytes(certificate.bytes_checked), "read again"],
  );
  $("figures").replaceChildren(...figures.map(([value, label]) => {
    const box = node("div");
    box.append(node("dt", label), node("dd", value));
    return box;
  }));
}
function drawRequests() {
  const body = $("requests").tBodies[0], focused = document.activeElement?.dataset?.request;
  $("requestbox").hidden = !last.requests.length;
  body.replaceChildren(...last.requests.map(request => {
    const row = node("tr"), bar = node("span"), fill = node("i"), progress = node("td"), name = node("td");
    const choice = node("button", request.request_id);
    choice.className = "pick"; choice.dataset.request = request.request_id;
    choice.setAttribute("aria-pressed", request.request_id === chosen);
    choice.onclick = () => choose(request.request_id);
    fill.style.width = `${100 * request.output_len / request.max_new_tokens}%`;
    bar.className = "bar"; bar.append(fill); progress.append(request.state === "waiting" ? "waiting" : bar);
    name.append(choice);
    row.append(name, cell(request.prompt_len), cell(request.output_len), progress, cell(request.pages.length));
    return row;
  }));
  if (focused) document.querySelector(`[data-request="${CSS.escape(focused)}"]`)?.focus();
}
function drawCertificate() {
  $("certificatebox").hidden = !last.sentences.length;
  const certificate = last.certificate;
  $("certnote").textContent = certificate && certificate.content ? `mode ${certificate.mode}, content ${certificate.content}` : "";
  $("certificate").replaceChildren(...last.sentences.map(([kind, text]) => {
    const line = node("li", text);
    line.className = kind;
    return line;
  }));
}
function drawVerdict() {
  const incidents = new Set(last.findings.map(finding => finding.incident)).size, watched = last.certificate && last.certificate.mode !== "off";
  const status = $("status");
  status.className = `status ${incidents ? "bad" : watched ? "good" : "muted"}`;
  status.lastElementChild.textContent = incidents ? `${number(incidents)} incident${incidents === 1 ? "" : "s"}` : watched ? "No findings" : "Not watched";
  $("verdict").textContent = incidents ? heading(last.findings[last.findings.length - 1]) : watched ? (last.sentences.find(([, text]) => text.startsWith("Every live byte")) ?? ["", "Nothing was found."])[1].replace(/ \(.*/, ".") : "The canary is off.";
}
function heading(finding) {
  const name = finding.name[0].toUpperCase() + finding.name.slice(1), place = finding.slot < 0 ? "" : ` in the ${finding.pool} pool, slot ${finding.slot}`;
  return `${name}${place}, step ${number(finding.step)}`;
}
let drawnIncidents = 0;
async function drawFindings() {
  const found = last.findings, timeline = $("timeline");
  $("timebox").hidden = found.length < 2;
  if (found.length > 1) drawTimeline(found, timeline);
  if (found.length === drawnIncidents) return;
  const answer = await fetch(`${prefix}/report`);
  if (!answer.ok) return;
  drawnIncidents = found.length;
  $("incidents").innerHTML = await answer.text();  // made by the server's template, which escapes every value
  $("codes").replaceChildren(...$("incidents").querySelectorAll(":scope > section"));
}
function drawTimeline(found, timeline) {
  const width = timeline.clientWidth, codes = [...new Set(found.map(finding => finding.code))], height = codes.length * 24 + 26;
  const x = step => 44 + (width - 64) * step / Math.max(last.step, 1);
  timeline.setAttribute("viewBox", `0 0 ${width} ${height}`); timeline.style.height = `${height}px`;
  const marks = codes.flatMap((code, row) => [
    shape("text", { x: 0, y: row * 24 + 16 }, code),
    shape("line", { x1: 44, x2: width - 20, y1: row * 24 + 12, y2: row * 24 + 12, class: "rule" }),
  ]);
  for (const finding of found) {
    const y = codes.indexOf(finding.code) * 24 + 12;
    if (finding.last_good_step !== null) marks.push(shape("line", {
      x1: x(finding.last_good_step), x2: x(finding.step), y1: y, y2: y, class: "doubt",
    }));
    marks.push(shape("circle", { cx: x(finding.step), cy: y, r: 5, class: "found" }));
  }
  const parts = Math.min(Math.max(last.step, 1), width > 600 ? 6 : 3);
  for (let part = 0; part <= parts; part++) {
    const step = Math.round(last.step * part / parts), anchor = part === 0 ? "start" : part === parts ? "end" : "middle";
    marks.push(shape("line", { x1: x(step), x2: x(step), y1: 4, y2: height - 18, class: "rule" }));
    marks.push(shape("text", { x: x(step), y: height - 4, "text-anchor": anchor }, part ? number(step) : "step 0"));
  }
  timeline.replaceChildren(...marks);
}
async function drawTree() {
  const svg = $("tree"), newest = last.findings[last.findings.length - 1];
  const request = chosen ?? (newest ? newest.readers[0] : undefined) ?? (last.requests[0] || {}).request_id;
  if (!request) { noTree(); return; }
  const answer = await fetch(`${prefix}/requests/${encodeURIComponent(request)}/tree`);
  if (!answer.ok) { noTree(); return; }
  $("treebox").hidden = false;
  const tree = await answer.json(), nodes = tree.nodes, deepest = Math.max(1, ...nodes.map(one => one.depth));
  const width = svg.clientWidth, children = nodes.map(() => []), place = [];
  nodes.forEach((one, index) => one.parent >= 0 && children[one.parent].push(index));
  let leaves = 0;
  const settle = index => {
    const rows = children[index].map(settle);
    place[index] = rows.length ? (rows[0] + rows[rows.length - 1]) / 2 : leaves++;
    return place[index];
  };
  settle(0);
  const step = Math.max(30, Math.min(64, 280 / leaves)), height = leaves * step + 26;
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`); svg.style.height = `${height}px`;
  const at = index => [24 + nodes[index].depth * (width - 70) / deepest, 8 + (place[index] + .5) * step], marks = [];
  nodes.forEach((one, index) => {
    if (one.parent < 0 || place[index] === undefined) return;
    const [x, y] = at(index), [px, py] = at(one.parent), half = (x + px) / 2;
    const path = `M${px} ${py} C${half} ${py} ${half} ${y} ${x} ${y}`;
    marks.push(shape("path", { d: path, class: one.accepted ? "edge taken" : "edge" }));
  });
  nodes.forEach((one, index) => {
    if (place[index] === undefined) return;
    const [x, y] = at(index);
    marks.push(shape("circle", { cx: x, cy: y, r: index ? 6 : 8, class: one.accepted ? "node taken" : "node" }));
    if (one.text !== undefined) marks.push(shape("text", { x: index ? x : x - 8, y: y - 12, "text-anchor": index ? "middle" : "start" }, JSON.stringify(one.text).slice(1, -1).replaceAll(" ", "·")));
  });
  const finding = last.findings.findLast(one => one.readers.includes(request) && one.position > tree.committed_len);
  const depth = finding ? finding.position - tree.committed_len : 0;
  if (depth > 0 && depth <= deepest) {
    const x = 24 + depth * (width - 70) / deepest, nodesThere = nodes.flatMap((one, index) => one.depth === depth && place[index] !== undefined ? [index] : []);
    const named = nodesThere.filter(index => nodes[index].slot === finding.slot);
    for (const index of named.length ? named : nodesThere) marks.push(shape("circle", { cx: at(index)[0], cy: at(index)[1], r: 11, class: "ring" }));
    marks.push(shape("text", { x, y: height - 2, "text-anchor": "middle", class: "named" }, `${finding.code}, position ${finding.position}`));
  }
  svg.replaceChildren(...marks);
  const taken = nodes.filter(one => one.accepted).length;
  $("treenote").textContent = `${tree.request_id} at length ${tree.committed_len}: ${nodes.length} nodes, ${taken} on the path taken`;
}
function noTree() { $("treebox").hidden = true; }
function choose(name) { chosen = chosen === name ? null : name; draw(); }
function draw() { drawVerdict(); drawFigures(); drawMap(); drawRequests(); drawCertificate(); drawFindings().catch(() => {}); drawTree().catch(noTree); }
function node(tag, text) { const made = document.createElement(tag); if (text !== undefined) made.textContent = text; return made; }
function cell(value) { const made = node("td", value); made.className = "n"; return made; }
function shape(tag, attributes, text) {
  const made = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  if (text !== undefined) made.textContent = text;
  return made;
}
function words(name) { return name.toLowerCase().replaceAll("_", " "); }
function number(value) { return value.toLocaleString("en"); }
function bytes(value) {
  for (const unit of ["B", "kB", "MB", "GB"]) { if (value < 1000 || unit === "GB") return `${value < 10 && unit !== "B" ? value.toFixed(1) : Math.round(value)} ${unit}`; value /= 1000; }
}
function tell(kind, text) { $("alive").className = kind; $("alive").lastElementChild.textContent = text; }
async function refresh() {
  try {
    const answer = await fetch(`${prefix}/state`);
    if (!answer.ok) throw new Error(answer.status);
    last = await answer.json();
    const pages = last.pages, held = pages.owner.filter(owner => owner >= 0).length, total = pages.state.length - pages.null_pages;
    $("poolnote").textContent = `${number(held)} of ${number(total)} held, ${pages.page_size} slots each`;
    tell(last.findings.length ? "found" : "live", last.findings.length ? "live, with findings" : "live");
    if (chosen && !last.requests.some(one => one.request_id === chosen)) chosen = null;
    draw();
  } catch (error) { tell("gone", "the server does not answer"); }
  setTimeout(refresh, 1000);
}
for (const button of document.querySelectorAll("[data-by]")) button.onclick = () => {
  by = button.dataset.by;
  for (const other of document.querySelectorAll("[data-by]")) other.setAttribute("aria-pressed", other === button);
  if (last) drawMap();
};
$("map").onpointermove = $("map").onpointerdown = event => {
  if (!cells) return;
  const page = Math.floor(event.offsetY / cells.size) * cells.columns + Math.floor(event.offsetX / cells.size);
  const next = event.offsetX < cells.columns * cells.size && page < cells.count ? page : null;
  if (next !== hovered) { hovered = next; drawMap(); }
};
$("map").onkeydown = event => {
  const by = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -(cells?.columns ?? 0), ArrowDown: cells?.columns ?? 0 }[event.key];
  if (!by || !cells) return;
  event.preventDefault();
  hovered = Math.max(0, Math.min(cells.count - 1, (hovered ?? -1) + by));
  drawMap();
};
$("map").onpointerleave = event => { if (event.pointerType === "mouse") { hovered = null; drawMap(); } };
window.onresize = () => last && draw();
matchMedia("(prefers-color-scheme: dark)").onchange = () => { tones.clear(); if (last) draw(); };
refresh();
