// What the page does by itself, in several turns, while Send waits: a long story, others who speak, and the comparison of turns with and without a hint.

import { letOthersSpeak } from "./others.js";
import { largestShare } from "./picture.js";
import { question, story, wordTokens } from "./story.js";
import { STAYED, Turns, point } from "./turns.js";

/** A story's tokens at most, and the share that it takes of what a conversation may have. */
const STORY_TOKENS = 8000;
const STORY_SHARE = 0.65;
/** What a story leaves free of it at least, for its answer and for turns after it. */
const ROOM_TOKENS = 512;
/** Another conversation's length, in lengths of this one; its tokens at least, and the share of what it may have that it takes at most. */
const OTHERS_LENGTHS = 1.5;
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
  /** Stories that the session has been told, and which session. */
  #stories = 0;
  #toldTo = "";
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

  /** Words of a story, or of another conversation, that come to so many tokens. */
  async #words(tokens) {
    this.#wordTokens ??= await wordTokens(this.#api, this.#model);
    return Math.max(8, Math.floor(tokens / this.#wordTokens));
  }

  /** The story's turn, or null: it failed, or the conversation has no room for it. */
  async tellStory(signal) {
    const chat = this.#chat;
    const tokens = Math.min(this.#storyTokens, this.#model.maxTokens - chat.tokens() - ROOM_TOKENS);
    if (tokens < this.#storyTokens / 4) {
      chat.note(`This conversation has ${count(chat.tokens())} of the ${count(this.#model.maxTokens)} tokens that this server has room for. Begin a new chat.`, true);
      return null;
    }
    if (this.#toldTo !== chat.session()) [this.#toldTo, this.#stories] = [chat.session(), 0];
    const words = await this.#words(tokens);
    signal.throwIfAborted();
    const turn = await chat.turn(story(Date.now(), words, this.#stories++));
    if (turn) chat.note(`That was ${count(turn.prompt)} tokens. Let others speak, so that they have to leave HBM.`);
    return turn;
  }

  /** Others speak; whether some of this session left HBM. saying: what is said before how far they are. */
  async letOthersSpeak(signal, saying = "") {
    const chat = this.#chat;
    const waiting = "Send waits for them, so that turns are measured alike …";
    chat.note(`${saying}Other conversations begin to speak; ${waiting}`);
    const tokens = Math.max(OTHERS_TOKENS, OTHERS_LENGTHS * chat.tokens());
    const words = await this.#words(Math.min(tokens, OTHERS_SHARE * this.#model.maxTokens));
    await letOthersSpeak(this.#api, this.#model, words, {
      signal,
      told: (spoken, of) => chat.note(`${saying}${spoken} of at most ${of} other conversations have spoken; ${waiting}`),
      enough: async () => {
        const kept = await this.#kept(signal);
        return kept !== null && kept.hbm < LITTLE && kept.dram < LITTLE;
      },
    });
    const left = (await this.#kept(signal))?.hbm ?? null;
    chat.othersSpoke(left);
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
    const asked = question(Math.max(0, this.#stories - 1));
    for (let done = 0; done < 2 * EACH; done++) {
      // The kinds take turns in going first.
      const hinted = done % 4 === 0 || done % 4 === 3;
      if (!(await this.letOthersSpeak(signal, `${done} of ${2 * EACH} turns measured; `))) return;
      if (hinted) chat.hint();
      await pause(TYPING_MS);
      signal.throwIfAborted();
      const turn = await chat.turn(asked, ANSWER_TOKENS);
      if (!turn) return;
      measured.add(turn);
      chat.point(done ? point(turn, measured.like(turn), true) : `1 of ${2 * EACH} turns measured.`);
    }
    chat.note(`Compared: the medians of ${EACH} turns with a hint and ${EACH} without, by turns, others speaking before each.`);
  }

  /** The largest shares of this session's cache that any node has in HBM and in DRAM; null: nothing is known of it. */
  async #kept(signal) {
    try {
      const seen = await this.#api.json(`/v1/sessions/${encodeURIComponent(this.#chat.session())}`, { signal });
      const [hbm, dram] = [largestShare(seen, "hbm"), largestShare(seen, "dram")];
      return hbm === null ? null : { hbm, dram };
    } catch (error) {
      if (error.status === 404) return null;
      throw error;
    }
  }
}
