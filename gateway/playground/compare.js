// The comparison: turns with and without a hint by turns, each after others have spoken and after the same pause.

/** Turns of each kind. */
export const EACH = 5;
/** What somebody takes to type a short message, in milliseconds: the hint leaves at its beginning, and the other kind of turn waits as long. */
const TYPING_MS = 1500;

const pause = (ms) => new Promise((resolve) => setTimeout(resolve, ms));

/**
 * Runs them all. crowd(): others speak; false: nothing left HBM, so there is nothing to compare. hint(): as a key would. turn(): sends one; null: it failed.
 * told(done, of) hears how far it is. The turns, or null where it ended early.
 */
export async function compared({ crowd, hint, turn, told, signal }) {
  const turns = [];
  for (let pair = 0; pair < EACH; pair++) {
    // Each kind goes first as often as the other, or nearly.
    for (const hinted of pair % 2 ? [false, true] : [true, false]) {
      told(turns.length, 2 * EACH);
      if (!(await crowd()) || signal.aborted) return null;
      if (hinted) hint();
      await pause(TYPING_MS);
      const measured = signal.aborted ? null : await turn();
      if (!measured) return null;
      turns.push(measured);
    }
  }
  return turns;
}
