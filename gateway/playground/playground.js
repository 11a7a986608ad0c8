// The page's start: a key where one is needed, the views, and the words at the top.

import * as api from "./api.js";
import { Chat } from "./chat.js";
import { FleetView } from "./fleet.js";

const by = (id) => document.getElementById(id);
const tabs = [...document.querySelectorAll("[role=tab]")];
const fleetView = new FleetView(api, by("view-fleet"));
let chat = null;

function choose(tab) {
  for (const each of tabs) {
    const chosen = each === tab;
    each.setAttribute("aria-selected", String(chosen));
    each.tabIndex = chosen ? 0 : -1;
    by(each.getAttribute("aria-controls")).hidden = !chosen || !chat;
  }
  if (chat) fleetView.show();
}

for (const tab of tabs) {
  tab.addEventListener("click", () => choose(tab));
  tab.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!step) return;
    const next = tabs[(tabs.indexOf(tab) + step + tabs.length) % tabs.length];
    next.focus();
    choose(next);
  });
}

async function start() {
  const server = by("server");
  try {
    const [models, fleet] = await Promise.all([api.json("/v1/models"), api.json("/v1/fleet")]);
    const nodes = [...new Set(fleet.nodes.map((device) => device.on_node))];
    const id = models.data[0]?.id;
    if (!id || !nodes.length) throw new Error("no model is served yet");
    const served = fleet.nodes.flatMap((node) => node.models).find((model) => model.name === id);
    const model = { id, layers: served?.layers ?? 1, chunkTokens: served?.chunk_tokens ?? 64, maxTokens: served?.max_tokens ?? 2048 };
    server.textContent = `${id} on ${nodes.length} ${nodes.length === 1 ? "node" : "nodes"}`;
    by("key-form").hidden = true;
    chat = new Chat(api, model, nodes);
    choose(tabs.find((tab) => tab.getAttribute("aria-selected") === "true"));
    chat.begin();
  } catch (error) {
    if (error.status === 401 || error.status === 403) return askForKey(error);
    server.textContent = `waiting for the server: ${error.message}`;
    setTimeout(start, 2000);
  }
}

function askForKey(error) {
  by("server").textContent = "a key is needed";
  by("key-wrong").textContent = api.key.get() ? `${error.message}; try another` : "";
  api.key.forget();
  by("view-chat").hidden = by("view-fleet").hidden = true;
  by("key-form").hidden = false;
  by("key").focus();
}

by("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  api.key.set(by("key").value.trim());
  by("key").value = "";
  start();
});

by("view-chat").hidden = true;
start();
