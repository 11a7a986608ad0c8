/** The React hook, a file of its own: pages without React do not load it. */
import { type RefObject } from "react";
import { type Options, type Target } from "upbeat-web";
/** Options of `attach`, and `target` where it is not the element that gets the hook's ref. */
export interface UpbeatOptions extends Options {
    target?: Target;
}
/**
 * Watch a field while the component is mounted: `const ref = useUpbeat({ session, token })`, then `<textarea ref={ref} />`.
 *
 * Rendering again costs nothing, and functions may be new ones each time. Another session, as a string, withdraws the hint of the one before.
 */
export declare function useUpbeat<E extends Element = HTMLTextAreaElement>(options: UpbeatOptions): RefObject<E | null>;
