// The operator's view: nodes, tiers, load, hints in flight, device memory, and the latest sessions.

import { drawMemory, size } from "./memory.js";

const EVERY_MS = 2000;

const text = (value, className) => {
  const cell = document.createElement("td");
  cell.textContent = value;
  if (className) cell.className = className;
  return cell;
};

function meter(className, used, total, said) {
  const cell = text(said, className);
  const bar = document.createElement("span");
  bar.className = "meter";
  const fill = document.createElement("i");
  fill.style.transform = `scaleX(${total ? Math.min(1, used / total).toFixed(3) : 0})`;
  bar.append(fill);
  cell.append(bar);
  return cell;
}

function ago(seconds) {
  if (!seconds) return "never";
  const passed = Math.max(0, Math.round(Date.now() / 1000 - seconds));
  return passed < 120 ? `${passed} s ago` : passed < 7200 ? `${Math.round(passed / 60)} min ago` : `${Math.round(passed / 3600)} h ago`;
}

/** Each cell has its column's name, which narrow windows show beside it. */
function labelled(row, table) {
  const names = [...table.querySelectorAll("th")].map((head) => head.textContent);
  [...row.cells].forEach((cell, i) => (cell.dataset.label = names[i]));
  return row;
}

/** What of HBM beside weights is in use and cached, and all of it: in bytes, or in pages where its worker tells no owners. */
function hbm(node) {
  if (!node.memory?.length) return [node.hbm_pages_total - node.hbm_pages_free, node.hbm_pages_cached, node.hbm_pages_total];
  const sum = (list, key) => list.reduce((total, one) => total + one[key], 0);
  const beside = node.memory.filter((share) => ["kv", "warm", "free"].includes(share.use));
  return [sum(node.models, "kv_bytes_used"), sum(node.models, "kv_bytes_cached"), sum(beside, "bytes")];
}

function nodeRow(node) {
  const row = document.createElement("tr");
  const [used, cached, total] = hbm(node);
  const state = node.state || (node.serving ? "serving" : "not serving");
  const percent = (part) => `${total ? Math.round((100 * part) / total) : 0} %`;
  row.append(
    text(node.node),
    text(state, node.serving ? "" : "away"),
    text(node.running),
    text(node.waiting),
    text(node.advised),
    meter("hbm", used, total, percent(used)),
    meter("hbm", cached, total, percent(cached)),
    meter("dram", node.dram_bytes_used, node.dram_bytes_total, `${size(node.dram_bytes_used)} of ${size(node.dram_bytes_total)}`),
    text(size(node.ssd_bytes_used)),
    text(node.sessions),
  );
  return row;
}

function sessionRow(session) {
  const row = document.createElement("tr");
  row.append(text(session.id), text(session.tokens.toLocaleString("en")), text(session.held_by.join(", ") || "–"), text(session.node ?? "–"), text(ago(session.last_use_s)));
  return row;
}

export class FleetView {
  #api;
  #place;
  #timer = 0;

  constructor(api, place) {
    this.#api = api;
    this.#place = place;
    document.addEventListener("visibilitychange", () => this.#place.hidden || this.show());
  }

  /** Draws now, and repeatedly while the view and the page are visible. */
  async show() {
    clearTimeout(this.#timer);
    if (this.#place.hidden || document.hidden) return;
    const state = this.#place.querySelector("#fleet-state");
    try {
      const [fleet, sessions] = await Promise.all([this.#api.json("/v1/fleet"), this.#api.json("/v1/sessions?limit=15")]);
      const serving = fleet.nodes.filter((node) => node.serving).length;
      const hints = fleet.nodes.reduce((total, node) => total + node.advised, 0);
      const said = `${serving} of ${fleet.expected_nodes} ${fleet.nodes.some((n) => n.node !== n.on_node) ? "devices" : "nodes"} serve; ${fleet.active_requests} requests run, ${hints} hints wait for theirs` + (fleet.missing.length ? `; ${fleet.missing.join("; ")}` : "");
      if (state.textContent !== said) state.textContent = said;
      this.#fill("#nodes", fleet.nodes.map(nodeRow));
      drawMemory(this.#place.querySelector("#devices"), fleet.nodes);
      this.#fill("#sessions", sessions.data.map(sessionRow));
    } catch (error) {
      state.textContent = `The fleet cannot be read: ${error.message}`;
    }
    clearTimeout(this.#timer);
    this.#timer = setTimeout(() => this.show(), EVERY_MS);
  }

  #fill(selector, rows) {
    const table = this.#place.querySelector(selector);
    table.tBodies[0].replaceChildren(...rows.map((row) => labelled(row, table)));
  }
}
