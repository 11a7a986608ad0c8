// The conversation: its messages, one turn after the other, and what each turn was measured to take.

import { hinting } from "./hints.js";
import { letOthersSpeak } from "./others.js";
import { Picture, follow, share } from "./picture.js";
import { story } from "./story.js";
import { Turns, comparable, milliseconds } from "./turns.js";

const MAX_TOKENS = 256;
const STORY_WORDS = 400;

const by = (id) => document.getElementById(id);
const count = (n) => n.toLocaleString("en");

export class Chat {
  #api;
  #model;
  #fleet;
  #turns = new Turns();
  #picture = new Picture(by("picture"));
  #session = "";
  #history = [];
  #residency = null;
  #saidTokens = 0;
  #lastNode = null;
  #hints = null;
  #watching = null;
  #running = null;
  #stories = 0;

  /** model: {id, layers, chunkTokens, maxTokens: of a prompt and its answer}; fleet: names of its nodes. */
  constructor(api, model, fleet) {
    this.#api = api;
    this.#model = model;
    this.#fleet = fleet;
    const prompt = by("prompt");
    by("compose").addEventListener("submit", (event) => {
      event.preventDefault();
      this.#say(prompt.value);
    });
    prompt.addEventListener("keydown", (event) => {
      // Enter that ends a composition (an IME) chooses a word; it sends nothing.
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      this.#say(prompt.value);
    });
    by("stop").addEventListener("click", () => this.#running?.abort());
    by("new").addEventListener("click", () => this.begin());
    by("story").addEventListener("click", () => this.#say(story(Date.now(), STORY_WORDS, this.#stories++)));
    by("others").addEventListener("click", () => this.#others());
    by("hints").addEventListener("change", () => this.#switchHints());
  }

  /** A new session; the old one stays where it is. */
  begin() {
    this.#running?.abort();
    this.#watching?.abort();
    const bytes = crypto.getRandomValues(new Uint8Array(6));
    this.#session = `playground-${Array.from(bytes, (b) => b.toString(16).padStart(2, "0")).join("")}`;
    this.#history = [];
    this.#saidTokens = 0;
    this.#lastNode = null;
    by("session").textContent = this.#session;
    by("session").title = this.#session;
    by("messages").replaceChildren();
    by("empty").hidden = false;
    by("why").hidden = true;
    for (const fact of ["node", "ttft", "cached", "ready"]) by(`fact-${fact}`).textContent = "–";
    this.#note("");
    this.#show({ id: this.#session, known: false, tokens: 0, hint_node: null, nodes: [], blob: null });
    this.#compare(null);
    const watching = (this.#watching = new AbortController());
    let lost = false;
    const shown = (seen) => {
      if (lost) this.#note("");
      lost = false;
      this.#show(seen);
    };
    const failed = (error) => {
      lost = true;
      this.#note(`The cache cannot be seen: ${error.message}`, true);
    };
    follow(this.#api, this.#session, watching.signal, shown, failed);
    this.#switchHints();
    by("prompt").focus();
  }

  #switchHints() {
    this.#hints?.detach();
    this.#hints = by("hints").checked ? hinting(this.#api, "#prompt", this.#session) : null;
  }

  // ---- the picture
  #show(residency) {
    this.#residency = residency;
    const node = residency.hint_node ?? this.#lastNode ?? residency.nodes[0]?.node ?? this.#fleet[0];
    this.#picture.show(residency, node, this.#fleet, this.#model.layers);
    const state = by("hint-state");
    state.classList.toggle("hinted", Boolean(residency.hint_node));
    const ready = Math.floor(100 * (share(residency, node, "hbm") ?? 0));
    const said = residency.hint_node
      ? `hinted: ${residency.hint_node} ${ready >= 99 ? "has everything in HBM" : `is fetching, ${ready} % is in HBM`}`
      : residency.known
        ? `no hint stands; ${count(residency.tokens)} tokens are kept, last on ${this.#lastNode ?? node}`
        : `nothing is kept of this session yet; a conversation is kept in chunks of ${this.#model.chunkTokens} tokens`;
    if (state.textContent !== said) state.textContent = said;
  }

  // ---- a turn
  async #say(text) {
    const prompt = by("prompt");
    if (!text.trim() || this.#running) return;
    const running = (this.#running = new AbortController());
    const before = this.#residency;
    const hinted = Boolean(before?.hint_node);
    const first = !this.#history.length;
    if (text === prompt.value) prompt.value = "";
    this.#busy(true);
    this.#note("");
    by("empty").hidden = true;
    this.#history.push({ role: "user", content: text });
    this.#message("user", text).item.classList.toggle("long", text.length > 600);
    const answer = this.#message("assistant", "");
    let said = "", usage = null, ttftMs = null, node = null;
    try {
      const sent = performance.now();
      const response = await this.#api.call("/v1/chat/completions", {
        method: "POST",
        signal: running.signal,
        headers: { "X-Session-Id": this.#session },
        body: { model: this.#model.id, messages: this.#history, stream: true, stream_options: { include_usage: true }, temperature: 0, max_tokens: MAX_TOKENS },
      });
      // The turn has been placed, so its hint is used up: the first key of the next message is to hint at once, not after the rest of four seconds.
      this.#switchHints();
      node = response.headers.get("X-Upbeat-Node");
      this.#why(response.headers.get("X-Upbeat-Why"));
      for await (const chunk of this.#api.events(response)) {
        if (chunk.error) throw new Error(chunk.error.message);
        const delta = chunk.choices[0]?.delta?.content;
        if (delta) {
          ttftMs ??= performance.now() - sent;
          said += delta;
          answer.text.textContent = said;
          by("messages").scrollTop = by("messages").scrollHeight;
        }
        usage = chunk.usage ?? usage;
      }
    } catch (error) {
      if (!running.signal.aborted) {
        answer.text.textContent = said;
        this.#failed(answer, error);
      }
    }
    this.#running = null;
    this.#busy(false);
    if (said) this.#history.push({ role: "assistant", content: said });
    else {
      this.#history.pop();
      if (running.signal.aborted) answer.item.remove();
    }
    if (node) this.#lastNode = node;
    if (usage && ttftMs !== null) this.#measured(answer, { session: this.#session, first, hinted, ttftMs, node, ready: before ? share(before, node, "hbm") : null }, usage);
    prompt.focus({ preventScroll: true });
  }

  #measured(answer, turn, usage) {
    turn.added = usage.prompt_tokens - this.#saidTokens;
    this.#saidTokens = usage.prompt_tokens + usage.completion_tokens;
    this.#turns.add(turn);
    const cached = usage.prompt_tokens_details?.cached_tokens ?? 0;
    const ready = turn.ready === null ? "–" : `${Math.floor(100 * turn.ready)} %`;
    by("fact-node").textContent = turn.node;
    by("fact-ttft").textContent = milliseconds(turn.ttftMs);
    by("fact-cached").textContent = `${count(cached)} of ${count(usage.prompt_tokens)} tokens`;
    by("fact-ready").textContent = turn.first ? "– (first turn)" : ready;
    const how = turn.first ? "first turn" : turn.hinted ? "with a hint" : "without a hint";
    answer.turn.textContent = `${turn.node} · first token after ${milliseconds(turn.ttftMs)} · ${count(cached)} of ${count(usage.prompt_tokens)} tokens cached · ${how}`;
    Object.assign(answer.item.dataset, { ttft: turn.ttftMs.toFixed(1), hinted: turn.hinted, ready: turn.ready ?? "", cached, prompt: usage.prompt_tokens, node: turn.node });
    this.#compare(turn);
    by("messages").scrollTop = by("messages").scrollHeight;
  }

  #compare(turn) {
    const without = this.#turns.without(this.#session);
    const hinted = turn?.hinted && comparable(turn) ? { ms: turn.ttftMs, count: 1 } : this.#turns.with(this.#session);
    const longest = Math.max(without?.ms ?? 0, hinted?.ms ?? 0) || 1;
    for (const [id, shown] of [["with", hinted], ["without", without]]) {
      by(`bar-${id}`).style.setProperty("--share", shown ? (shown.ms / longest).toFixed(3) : 0);
      by(`bar-${id}-text`).textContent = milliseconds(shown?.ms);
    }
    by("counterfactual").textContent = without
      ? `“Without the hint” is measured: the median of ${without.count} ${without.count === 1 ? "turn" : "turns"} ${without.here ? "of this chat" : "of earlier chats in this page"} sent without one.`
      : "“Without the hint” is measured, not guessed: switch hints off for a turn, or paste and send at once, to have something to compare with.";
  }

  async #others() {
    const button = by("others");
    button.disabled = true;
    try {
      await letOthersSpeak(this.#api, this.#model, (spoken, of) => this.#note(`${spoken} of ${of} other conversations have spoken …`));
      this.#note("The others have spoken. Is this session still in HBM? Type, and see it come back.");
    } catch (error) {
      this.#note(`The others could not speak: ${error.message}`, true);
    }
    button.disabled = false;
  }

  // ---- the page
  #message(role, text) {
    const item = document.createElement("li");
    item.className = role;
    const who = document.createElement("span");
    who.className = "seen-by-readers";
    who.textContent = role === "user" ? "You: " : "Answer: ";
    const body = document.createElement("p");
    body.textContent = text;
    const turn = document.createElement("div");
    turn.className = "turn";
    item.append(who, body, turn);
    by("messages").append(item);
    by("messages").scrollTop = by("messages").scrollHeight;
    return { item, text: body, turn };
  }

  #failed(answer, error) {
    answer.turn.textContent = `No answer: ${error.message}`;
    answer.turn.classList.add("failed");
  }

  #why(text) {
    by("why").hidden = !text;
    by("why-text").textContent = text ?? "";
  }

  #busy(is) {
    by("send").hidden = is;
    by("stop").hidden = !is;
    by("story").disabled = is;
    by("messages").setAttribute("aria-busy", String(is));
  }

  #note(text, bad = false) {
    by("said").textContent = text;
    by("said").classList.toggle("bad", bad);
  }
}
