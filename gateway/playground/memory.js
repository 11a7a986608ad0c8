// Who holds each device's memory, drawn as one bar by owner, and what its models are doing.

const GIB = 2 ** 30;
const COLOURS = 5;
const NOBODYS = ["warm", "free"];
const USES = { weights: "weights", kv: "KV" };
const STATES = { loading: "waking", draining: "giving way" };

export const size = (bytes) => (bytes >= GIB ? `${(bytes / GIB).toFixed(2)} GiB` : `${(bytes / 2 ** 20).toFixed(0)} MiB`);

const element = (tag, className, text = "") => Object.assign(document.createElement(tag), { className, textContent: text });

/** Names of owners in the order of their colours: the device's models first. */
const owners = (device) => [...new Set([...device.models.map((m) => m.name), ...device.memory.map((share) => share.name)])].filter(Boolean);

const words = (share) => `${USES[share.use] ?? share.use} ${size(share.bytes)}`;

/** How many of a model's layers lend their memory to KV; empty: none. */
const lent = (model) => (model?.layers_lent ? `, ${model.layers_lent} of ${model.layers} layers lent` : "");

/** What one model does and holds, in words. */
export function said(model, memory) {
  const left = model.state === "loading" && model.activation_s > 0 ? `, ${model.activation_s.toFixed(1)} s left` : "";
  const work = model.running || model.waiting ? `, ${model.running} running, ${model.waiting} waiting` : "";
  const held = memory.filter((share) => share.name === model.name).map(words);
  return `${STATES[model.state] ?? model.state}${left}${work}; ${held.join(", ") || "no memory"}${lent(model)}`;
}

function bar(device, names) {
  const drawn = element("span", "owners");
  drawn.setAttribute("role", "img");
  drawn.setAttribute("aria-label", `Memory of ${device.node}: ${device.memory.map((share) => [share.name, words(share)].filter(Boolean).join(" ")).join(", ")}`);
  for (const share of device.memory.filter((each) => each.bytes > 0)) {
    const part = element("i", NOBODYS.includes(share.use) || share.use === "kv" ? share.use : "weights");
    part.style.flexGrow = share.bytes;
    if (share.name) part.dataset.colour = names.indexOf(share.name) % COLOURS;
    drawn.append(part);
  }
  return drawn;
}

function item(device) {
  const names = owners(device);
  const found = element("li", "");
  const models = element("ul", "models");
  for (const model of device.models) {
    const line = element("li", model.state);
    line.dataset.colour = names.indexOf(model.name) % COLOURS;
    line.append(element("b", "", model.name), ` ${said(model, device.memory)}`);
    models.append(line);
  }
  const rest = device.memory.filter((share) => NOBODYS.includes(share.use)).map(words);
  found.append(element("b", "", device.node), element("span", "quiet", rest.join(", ")), bar(device, names), models);
  return found;
}

/** Draws the devices whose workers say who holds their memory into `place`; hides it when there are none. */
export function drawMemory(place, devices) {
  const known = devices.filter((device) => device.memory?.length);
  place.hidden = !known.length;
  place.querySelector("ul").replaceChildren(...known.map(item));
}
