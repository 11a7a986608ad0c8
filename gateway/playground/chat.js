// The conversation: its messages, one turn after the other, and what each turn was measured to take.

import { hintedSince, hinting } from "./hints.js";
import { Picture, follow, share } from "./picture.js";
import { Tasks } from "./tasks.js";
import { Turns, milliseconds, point } from "./turns.js";
import { ASKED, waterfall } from "./waterfall.js";

const MAX_TOKENS = 256;

const by = (id) => document.getElementById(id);
const count = (n) => n.toLocaleString("en");
/** The text shown of a message: of a story only its beginning and end, because layout of all of it takes longer than most first tokens. */
const LONG = 600;
const excerpt = (text) => (text.length <= 2 * LONG ? text : `${text.slice(0, LONG)} … (${count(text.length)} characters) … ${text.slice(-LONG / 2)}`);

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
  /** The share of the cache in HBM after others spoke; null: no others have spoken since the last turn. */
  #left = null;
  #hints = null;
  /** Hints sent before this time belong to earlier turns. */
  #hintsFromMs = 0;
  #watching = null;
  #running = null;
  /** What keeps Send waiting: others speak, or turns are compared. */
  #task = null;
  #tasks;

  /** model: {id, layers, chunkTokens, maxTokens: of a prompt and its answer}; fleet: names of its nodes. */
  constructor(api, model, fleet) {
    this.#api = api;
    this.#model = model;
    this.#fleet = fleet;
    this.#tasks = new Tasks(api, model, {
      session: () => this.#session,
      tokens: () => this.#saidTokens,
      turn: (text, maxTokens) => this.#turn(text, maxTokens),
      hint: () => (this.#hints = hinting(api, "#prompt", this.#session)).advise(),
      othersSpoke: (left) => (this.#left = left),
      point: (text) => (by("point").textContent = text),
      note: (text, bad) => this.#note(text, bad),
    });
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
    by("stop").addEventListener("click", () => this.#stop());
    by("new").addEventListener("click", () => this.begin());
    by("story").addEventListener("click", () => this.#occupied((signal) => this.#tasks.tellStory(signal)));
    by("others").addEventListener("click", () => this.#occupied((signal) => this.#tasks.letOthersSpeak(signal)));
    by("compare").addEventListener("click", () => this.#occupied((signal) => this.#tasks.compare(signal)));
    by("hints").addEventListener("change", () => this.#switchHints());
  }

  /** Starts a new session; the old one is not erased. */
  begin() {
    this.#stop();
    this.#watching?.abort();
    const bytes = crypto.getRandomValues(new Uint8Array(6));
    this.#session = `playground-${Array.from(bytes, (b) => b.toString(16).padStart(2, "0")).join("")}`;
    this.#history = [];
    this.#saidTokens = 0;
    this.#lastNode = this.#left = null;
    by("session").textContent = this.#session;
    by("session").title = this.#session;
    by("messages").replaceChildren();
    by("empty").hidden = false;
    by("why").hidden = true;
    for (const fact of ["node", "ttft", "cached", "ready"]) by(`fact-${fact}`).textContent = "–";
    this.#note("");
    this.#show({ id: this.#session, known: false, tokens: 0, hint_node: null, nodes: [], blob: null });
    this.#bars(null);
    by("point").textContent = "What typing saves: tell a long story, let others speak, then type and send. Or have it done:";
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

  #stop() {
    this.#task?.abort();
    this.#running?.abort();
  }

  /** Makes the next key send a hint at once. While others speak no hint is sent, because it would keep this session in memory. */
  #switchHints() {
    this.#hints?.detach();
    this.#hints = by("hints").checked && !this.#task ? hinting(this.#api, "#prompt", this.#session) : null;
    this.#hintsFromMs = performance.now();
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
  /** Sends the typed text, unless a turn or task is running. */
  #say(text) {
    if (!text.trim() || this.#running || this.#task) return;
    if (text === by("prompt").value) by("prompt").value = "";
    return this.#turn(text);
  }

  /** Runs one turn. Returns its measurements, or null. */
  async #turn(text, maxTokens = MAX_TOKENS) {
    const running = (this.#running = new AbortController());
    const session = this.#session;
    const before = this.#residency;
    const hinted = Boolean(before?.hint_node) || hintedSince(this.#hintsFromMs);
    const [first, left] = [!this.#history.length, this.#left];
    this.#left = null;
    this.#busy();
    if (!this.#task) this.#note("");
    by("empty").hidden = true;
    this.#history.push({ role: "user", content: text });
    this.#message("user", excerpt(text)).item.classList.toggle("long", text.length > LONG);
    const answer = this.#message("assistant", "");
    let said = "", usage = null, ttftMs = null, node = null, timing = null;
    try {
      const sent = performance.now();
      const response = await this.#api.call("/v1/chat/completions", {
        method: "POST",
        signal: running.signal,
        headers: { "X-Session-Id": session, ...ASKED },
        body: { model: this.#model.id, messages: this.#history, stream: true, stream_options: { include_usage: true }, temperature: 0, max_tokens: maxTokens },
      });
      node = response.headers.get("X-Upbeat-Node");
      this.#why(response.headers.get("X-Upbeat-Why"));
      for await (const chunk of this.#api.events(response, (comment) => (timing = comment))) {
        if (chunk.error) throw new Error(chunk.error.message);
        const { content = "", reasoning_content: thought = "" } = chunk.choices[0]?.delta ?? {};
        if (content || thought) {
          if (ttftMs === null) {
            ttftMs = performance.now() - sent;
            // This turn's hint is used up: let the first key of the next message send one at once, not after the rest of four seconds.
            this.#switchHints();
          }
          said += content ?? "";
          answer.text.textContent = said;
          if (thought) this.#thinks(answer, thought);
          if (content && answer.thoughts) answer.thoughts.open = false;
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
    if (ttftMs === null) this.#switchHints();
    if (this.#running === running) this.#running = null;
    this.#busy();
    if (session !== this.#session) return null; // a new chat has begun meanwhile
    if (said) this.#history.push({ role: "assistant", content: said });
    else {
      this.#history.pop();
      if (running.signal.aborted) answer.item.remove();
    }
    if (node) this.#lastNode = node;
    if (!this.#task) by("prompt").focus({ preventScroll: true });
    if (!usage || ttftMs === null) return null;
    const turn = { session, first, hinted, left, ttftMs, node, ready: before ? share(before, node, "hbm") : null };
    this.#measured(answer, turn, usage, waterfall(timing));
    return turn;
  }

  #measured(answer, turn, usage, times) {
    turn.prompt = usage.prompt_tokens;
    turn.cached = usage.prompt_tokens_details?.cached_tokens ?? 0;
    turn.added = turn.prompt - this.#saidTokens;
    this.#saidTokens = turn.prompt + usage.completion_tokens;
    this.#turns.add(turn);
    const ready = turn.ready === null ? "–" : `${Math.floor(100 * turn.ready)} %`;
    by("fact-node").textContent = turn.node;
    by("fact-ttft").textContent = milliseconds(turn.ttftMs);
    by("fact-cached").textContent = `${count(turn.cached)} of ${count(turn.prompt)} tokens`;
    by("fact-ready").textContent = turn.first ? "– (first turn)" : ready;
    const how = turn.first ? "first turn" : turn.hinted ? "with a hint" : "without a hint";
    answer.turn.textContent = `${turn.node} · first token after ${milliseconds(turn.ttftMs)} · ${count(turn.cached)} of ${count(turn.prompt)} tokens cached · ${how}`;
    if (times) answer.turn.append(times);
    const { ttftMs, hinted, cached, prompt, node } = turn;
    Object.assign(answer.item.dataset, { ttft: ttftMs.toFixed(1), hinted, ready: turn.ready ?? "", left: turn.left ?? "", cached, prompt, node });
    this.#bars(turn);
    by("point").textContent = point(turn, this.#turns.like(turn));
    by("messages").scrollTop = by("messages").scrollHeight;
  }

  /** Times of comparable turns; null: none yet. */
  #bars(turn) {
    const measured = turn ? this.#turns.like(turn) : {};
    const longest = Math.max(...Object.values(measured).map((took) => took?.ms ?? 0), 1);
    for (const kind of ["hinted", "without", "anew"]) {
      by(`bar-${kind}`).style.setProperty("--share", ((measured[kind]?.ms ?? 0) / longest).toFixed(3));
      by(`bar-${kind}-text`).textContent = milliseconds(measured[kind]?.ms);
    }
    const of = (kind) => count(measured[kind]?.count ?? 0);
    by("counted").textContent =
      `Measured, not estimated: medians of this page’s turns of like length, ${of("hinted")} with a hint and ${of("without")} without. ` +
      "They count when others had spoken since the turn before, and some of the cache had left HBM.";
  }

  // ---- what keeps Send waiting
  /** Runs `act(signal)` while nothing else can be sent. */
  async #occupied(act) {
    if (this.#task || this.#running) return;
    const task = (this.#task = new AbortController());
    this.#switchHints();
    this.#busy();
    this.#note("");
    try {
      await act(task.signal);
    } catch (error) {
      this.#note(task.signal.aborted ? "Stopped." : `That did not go well: ${error.message}`, !task.signal.aborted);
    }
    this.#task = null;
    this.#switchHints();
    this.#busy();
    by("prompt").focus({ preventScroll: true });
  }

  // ---- the page
  /** Shows the model's thought above its answer. It is not sent back with the next turn. */
  #thinks(answer, thought) {
    if (!answer.thoughts) {
      answer.thoughts = document.createElement("details");
      answer.thoughts.open = true;
      const summary = document.createElement("summary");
      summary.textContent = "Thoughts";
      answer.thoughts.append(summary, document.createElement("p"));
      answer.text.before(answer.thoughts);
    }
    answer.thoughts.lastChild.textContent += thought;
  }

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

  #busy() {
    const [turn, task] = [Boolean(this.#running), Boolean(this.#task)];
    by("send").hidden = turn && !task;
    by("send").disabled = task;
    by("stop").hidden = !turn && !task;
    for (const id of ["story", "others", "compare"]) by(id).disabled = turn || task;
    by("messages").setAttribute("aria-busy", String(turn));
  }

  #note(text, bad = false) {
    by("said").textContent = text;
    by("said").classList.toggle("bad", bad);
  }
}
