// Measured turns, and which of them are comparable: turns of this page of similar length whose session was evicted from HBM since the turn before.

/** The median, or null of no values. */
export function median(values) {
  if (!values.length) return null;
  const sorted = [...values].sort((a, b) => a - b);
  const middle = sorted.length >> 1;
  return sorted.length % 2 ? sorted[middle] : (sorted[middle - 1] + sorted[middle]) / 2;
}

/** Tokens that a comparable turn may add to its conversation: more would mostly measure computing. */
const MUCH = 200;
/** Lengths that differ by less than this share of the longer one are similar. */
const ALIKE = 0.2;
/** A session with this share of its cache in HBM counts as not evicted. */
export const STAYED = 0.9;

export const milliseconds = (ms) => (ms == null ? "–" : ms < 1000 ? `${Math.round(ms)} ms` : `${(ms / 1000).toFixed(2)} s`);

/** Whether a turn is comparable: it had cache to load and little to compute. */
export const comparable = (turn) => !turn.first && turn.added <= MUCH && turn.left !== null && turn.left < STAYED;

const alike = (a, b) => Math.abs(a.prompt - b.prompt) <= ALIKE * Math.max(a.prompt, b.prompt);

/**
 * Turns of this page. A turn: {session, first, added, prompt, cached, hinted, left, ttftMs}; first: of its session, so there was nothing to bring; added:
 * tokens that its prompt has beyond the last one's prompt and answer; left: the share of the cache that was in HBM after others had spoken, null where
 * none had since the turn before.
 */
export class Turns {
  #all = [];

  add(turn) {
    this.#all.push(turn);
  }

  /** What turns like `turn` took, each {ms: median, count} or null: with a hint, without one, and (nothing cached) computed from the first token on. */
  like(turn) {
    const took = (wanted) => {
      const found = this.#all.filter((other) => alike(other, turn) && wanted(other)).map((other) => other.ttftMs);
      return found.length ? { ms: median(found), count: found.length } : null;
    };
    return {
      hinted: took((t) => t.hinted && comparable(t)),
      without: took((t) => !t.hinted && comparable(t)),
      anew: took((t) => t.cached < 0.05 * t.prompt),
    };
  }
}

/**
 * The point, in plain words: what the last turn took, and what it would have taken. `measured`: of turns like it (`Turns.like`); compared: these are the
 * medians of a comparison that has ended. Measured, never estimated: where a hint gains nothing, that is said.
 */
export function point(turn, measured, compared = false) {
  const { hinted, without } = measured;
  if (!comparable(turn) && !compared) return missing(turn);
  if (!hinted) return `${milliseconds(turn.ttftMs)} without a hint. To compare: let others speak, then type and send.`;
  if (!without) return `${milliseconds(turn.ttftMs)}, because you typed. To compare: let others speak, then send one with hints off.`;
  const with_ = compared || !turn.hinted ? hinted.ms : turn.ttftMs;
  const cold = compared || turn.hinted ? without.ms : turn.ttftMs;
  if (with_ >= cold) return `No gain: ${milliseconds(with_)} with a hint, ${milliseconds(cold)} without.`;
  if (compared || turn.hinted) return `${milliseconds(with_)} instead of ${milliseconds(cold)}, because ${compared ? "a hint came first" : "you typed"}.`;
  return `${milliseconds(cold)}, because no hint came: with one it is ${milliseconds(with_)}.`;
}

/** Why a turn is not comparable, and the remedy. */
function missing(turn) {
  const took = milliseconds(turn.ttftMs);
  if (turn.first || turn.added > MUCH) return `${took}: this turn computed ${turn.prompt - turn.cached} tokens. Now let others speak, then type.`;
  if (turn.left === null) return `${took}: nobody else spoke since the last turn, so its cache was still in HBM. Let others speak, then type.`;
  return `${took}: nothing of this session ever left HBM, so a hint had nothing to bring.`;
}
