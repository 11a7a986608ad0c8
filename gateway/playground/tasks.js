// Tasks of several turns, during which Send waits: a long story, others speaking, and the comparison of turns with and without a hint.

import { letOthersSpeak } from "./others.js";
import { largestShare } from "./picture.js";
import { progress } from "./progress.js";
import { QUESTION, story, wordTokens } from "./story.js";
import { STAYED, Turns, point } from "./turns.js";

/** A conversation's tokens with its story at most, beyond which the bundled model forgets what it is told; and the share of what a conversation may have. */
const STORY_TOKENS = 3400;
const STORY_SHARE = 0.65;
/** Tokens that a story leaves free at least, for its answer and later turns. */
const ROOM_TOKENS = 512;
/** Another conversation's length, in lengths of this one; its tokens at least, and the share of what it may have that it takes at most. */
const OTHERS_LENGTHS = 2.5;
const OTHERS_TOKENS = 1000;
const OTHERS_SHARE = 0.9;
/** The others have spoken enough when no node has more than this share of the session's cache in HBM, nor in DRAM. */
const LITTLE = 0.25;
/** Turns of each kind in a comparison, and tokens of an answer in it. */
const EACH = 5;
const ANSWER_TOKENS = 16;
/** What somebody takes to type a short message, in milliseconds: the hint leaves at its beginning, and a turn without one waits as long. */
const TYPING_MS = 1500;

const count = (n) => n.toLocaleString("en");
const pause = (ms) => new Promise((resolve) => setTimeout(resolve, ms));

export class Tasks {
  #api;
  #model;
  #chat;
  #wordTokens = null;

  /** chat: {session(), tokens(): of the conversation, turn(text, maxTokens): what was measured or null, hint(): as a key would, othersSpoke(left),
   * point(text), note(text, bad)}. */
  constructor(api, model, chat) {
    this.#api = api;
    this.#model = model;
    this.#chat = chat;
  }

  get #storyTokens() {
    return Math.min(STORY_TOKENS, Math.floor(STORY_SHARE * this.#model.maxTokens));
  }

  /** Words of a story, or of another conversation, for this many tokens. */
  async #words(tokens) {
    this.#wordTokens ??= await wordTokens(this.#api, this.#model);
    return Math.max(8, Math.floor(tokens / this.#wordTokens));
  }

  /** The story's turn; null: it failed, or does not fit into the conversation. */
  async tellStory(signal) {
    const chat = this.#chat;
    const tokens = Math.min(this.#storyTokens, this.#model.maxTokens - ROOM_TOKENS) - chat.tokens();
    if (tokens < this.#storyTokens / 4) {
      chat.note(`This conversation has ${count(chat.tokens())} tokens, and no room for a story: with one it is to have ${count(this.#storyTokens)} at most. Begin a new chat.`, true);
      return null;
    }
    const words = await this.#words(tokens);
    signal.throwIfAborted();
    const turn = await chat.turn(story(Date.now(), words));
    if (turn) chat.note(`That was ${count(turn.prompt)} tokens. Let others speak, so that they have to leave HBM.`);
    return turn;
  }

  /** Others speak; whether some of this session left HBM. saying(): what is said before how far they are. */
  async letOthersSpeak(signal, saying = () => "") {
    const chat = this.#chat;
    const session = chat.session();
    const waiting = "Send waits for them, so that turns are measured alike …";
    chat.note(`${saying()}Other conversations begin to speak; ${waiting}`);
    const tokens = Math.max(OTHERS_TOKENS, OTHERS_LENGTHS * chat.tokens());
    const words = await this.#words(Math.min(tokens, OTHERS_SHARE * this.#model.maxTokens));
    try {
      await letOthersSpeak(this.#api, this.#model, words, {
        signal,
        told: (spoken, of) => chat.note(`${saying()}${spoken} of at most ${of} other conversations have spoken; ${waiting}`),
        enough: async () => {
          const kept = await this.#kept(session, signal);
          return kept !== null && kept.hbm < LITTLE && kept.dram < LITTLE;
        },
      });
    } catch (error) {
      // Conversations that spoke before a Stop have evicted some of it, too.
      await this.#othersSpoke(session).catch(() => {});
      throw error;
    }
    const left = await this.#othersSpoke(session);
    if (left !== null && left < STAYED) {
      chat.note(`The others have spoken: ${Math.floor(100 * left)} % of this session is left in HBM. Type, see it come back, and send.`);
      return true;
    }
    const why =
      left === null
        ? "The others have spoken, but nothing of this session was cached. Tell a long story first."
        : chat.tokens() < this.#storyTokens / 2
          ? "Nothing of this session left HBM: it is short. Tell a long story first."
          : "Nothing of this session left HBM: this server has room for everybody, so a hint has nothing to bring. Start it with less memory (--hbm-gib, --dram-gib).";
    chat.note(why, true);
    return false;
  }

  /** Turns with and without a hint by turns, each after others have spoken and after the same pause; says what they took. */
  async compare(signal) {
    const chat = this.#chat;
    if (chat.tokens() < this.#storyTokens / 2 && !(await this.tellStory(signal))) return;
    const measured = new Turns();
    const began = performance.now();
    let ended = began;
    for (let done = 0; done < 2 * EACH; done++) {
      // Alternate which kind goes first.
      const hinted = done % 4 === 0 || done % 4 === 3;
      if (!(await this.letOthersSpeak(signal, () => progress(done, 2 * EACH, ended - began, performance.now() - ended)))) return;
      if (hinted) chat.hint();
      await pause(TYPING_MS);
      signal.throwIfAborted();
      const turn = await chat.turn(QUESTION, ANSWER_TOKENS);
      if (!turn) return;
      measured.add(turn);
      ended = performance.now();
      chat.point(done ? point(turn, measured.like(turn), true) : `1 of ${2 * EACH} turns measured.`);
    }
    chat.note(`Compared: the medians of ${EACH} turns with a hint and ${EACH} without, by turns, others speaking before each.`);
  }

  /** The share of the session's cache left in HBM after others spoke; also stored in the chat. null: unknown session. */
  async #othersSpoke(session) {
    const left = (await this.#kept(session))?.hbm ?? null;
    if (this.#chat.session() === session) this.#chat.othersSpoke(left);
    return left;
  }

  /** The largest shares of the session's cache that any node has in HBM and in DRAM; null: unknown session. */
  async #kept(session, signal) {
    try {
      const seen = await this.#api.json(`/v1/sessions/${encodeURIComponent(session)}`, { signal });
      const [hbm, dram] = [largestShare(seen, "hbm"), largestShare(seen, "dram")];
      return hbm === null ? null : { hbm, dram };
    } catch (error) {
      if (error.status === 404) return null;
      throw error;
    }
  }
}
