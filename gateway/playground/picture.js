// Where one session's cache is, drawn: a row a tier, a column a layer.

const TIERS = { hbm: "HBM", dram: "DRAM", ssd: "SSD" };

const most = (tiers) => Math.max(0, ...tiers.flatMap((tier) => tier.layer_chunks));
const sum = (numbers) => numbers.reduce((a, b) => a + b, 0);

/** The node of a device, `node-0` of `node-0/1`: turns run on devices, caches are reported by node. */
const nodeOf = (name) => name?.split("/")[0];

/** Share of the session's cache, 0 to 1, in `tier` of a device's node; null: unknown session. */
export function share(residency, node, tier) {
  const whole = size(residency);
  if (!whole) return null;
  const found = residency.nodes.find((n) => n.node === nodeOf(node))?.tiers.find((t) => t.tier === tier);
  return found ? sum(found.layer_chunks) / whole : 0;
}

/** The largest such share of any node; null: unknown session. */
export function largestShare(residency, tier) {
  return size(residency) ? Math.max(...residency.nodes.map((n) => share(residency, n.node, tier)), 0) : null;
}

/** Number of pieces (layers of chunks) of the session's cache, as far as tiers show. */
function size(residency) {
  const tiers = everything(residency);
  return most(tiers) * Math.max(0, ...tiers.map((tier) => tier.layer_chunks.length));
}

const everything = (residency) => [...residency.nodes.flatMap((node) => node.tiers), ...(residency.blob ? [residency.blob] : [])];

/** The rows to draw: the tiers of the answering device's node, the blob tier, and one row for each other node. */
function rows(residency, device) {
  const main = nodeOf(device);
  const of = (name) => residency.nodes.find((n) => n.node === name)?.tiers ?? [];
  const drawn = Object.keys(TIERS).map((tier) => {
    const held = of(main).find((t) => t.tier === tier);
    return { tier, label: TIERS[tier], name: `${TIERS[tier]} of ${main ?? "no node"}`, chunks: held?.layer_chunks ?? [] };
  });
  drawn.push({ tier: "blob", label: "blob", name: "blob store", chunks: residency.blob?.layer_chunks ?? [] });
  const others = residency.nodes.filter((n) => n.node !== main).sort((a, b) => most(b.tiers) - most(a.tiers) || a.node.localeCompare(b.node));
  for (const other of others.slice(0, 4)) {
    const layers = Math.max(0, ...other.tiers.map((t) => t.layer_chunks.length));
    const chunks = Array.from({ length: layers }, (_, layer) => Math.max(0, ...other.tiers.map((t) => t.layer_chunks[layer] ?? 0)));
    drawn.push({ tier: "peer", label: other.node, name: other.node, chunks });
  }
  return drawn;
}

/** Draws into `place` (an element with role=img) at each `show`. Elements are reused, so that changes can be animated. */
export class Picture {
  #place;
  #rows = new Map();
  #peers = [];

  constructor(place) {
    this.#place = place;
  }

  /** nodes: all of the fleet, so that nodes without cache have a row too. main: the answering device. */
  show(residency, main, nodes, layers) {
    const known = new Set(residency.nodes.map((n) => n.node));
    this.#peers = nodes.filter((name) => !known.has(name)).map((node) => ({ node, tiers: [] }));
    const whole = most(everything(residency));
    const columns = Math.max(1, layers, ...everything(residency).map((tier) => tier.layer_chunks.length));
    const drawn = rows({ ...residency, nodes: [...residency.nodes, ...this.#peers] }, main);
    const wanted = new Set();
    for (const row of drawn) {
      const id = row.tier === "peer" ? `peer-${row.label}` : row.tier;
      wanted.add(id);
      this.#draw(this.#row(id, row, columns), row, columns, whole);
    }
    for (const [id, made] of this.#rows) {
      if (!wanted.has(id)) {
        made.element.remove();
        this.#rows.delete(id);
      }
    }
    this.#place.classList.toggle("hinted", Boolean(residency.hint_node));
    const said = drawn.map((row) => `${row.name} ${percent(row.chunks, columns, whole)}`).join(", ");
    this.#place.setAttribute("aria-label", whole ? `Of this session's cache: ${said}` : "Nothing is cached yet");
  }

  #row(id, row, columns) {
    let made = this.#rows.get(id);
    if (made && made.cells.length === columns) return made;
    made?.element.remove();
    const element = document.createElement("div");
    element.className = "row";
    element.dataset.tier = row.tier;
    const label = document.createElement("b");
    const cells = document.createElement("span");
    cells.className = columns > 24 ? "cells many" : "cells";
    for (let i = 0; i < columns; i++) {
      const cell = document.createElement("span");
      cell.className = "cell";
      cell.append(document.createElement("i"));
      cells.append(cell);
    }
    const text = document.createElement("em");
    element.append(label, cells, text);
    this.#place.append(element);
    made = { element, label, text, cells: [...cells.querySelectorAll("i")] };
    this.#rows.set(id, made);
    return made;
  }

  #draw(made, row, columns, whole) {
    if (made.label.textContent !== row.label) made.label.textContent = row.label;
    made.label.title = row.name;
    made.cells.forEach((cell, layer) => {
      const filled = whole ? (row.chunks[layer] ?? 0) / whole : 0;
      cell.style.transform = `scaleY(${filled.toFixed(3)})`;
    });
    made.element.dataset.share = whole ? (sum(row.chunks) / (whole * columns)).toFixed(3) : "0";
    made.text.textContent = percent(row.chunks, columns, whole);
  }
}

const percent = (chunks, columns, whole) => `${whole ? Math.floor((100 * sum(chunks)) / (whole * columns)) : 0} %`;

/** The session's residency as it changes, until `signal` ends it: reconnects when a stream ends or fails. */
export async function follow(api, session, signal, shown, failed) {
  while (!signal.aborted) {
    try {
      const response = await api.call(`/v1/sessions/${encodeURIComponent(session)}/events`, { signal });
      for await (const residency of api.events(response)) shown(residency);
    } catch (error) {
      if (signal.aborted) return;
      failed(error);
    }
    await new Promise((resolve) => setTimeout(resolve, 1500));
  }
}
