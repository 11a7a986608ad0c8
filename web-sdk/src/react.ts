/** The React hook, a file of its own: pages without React do not load it. */
import { useEffect, useRef, type RefObject } from "react";
import { attach, type Options, type Target } from "upbeat-web";

/** Options of `attach`, and `target` where it is not the element that gets the hook's ref. */
export interface UpbeatOptions extends Options {
  target?: Target;
}

const value = <T, A extends unknown[]>(given: T | ((...args: A) => T), ...args: A): T =>
  typeof given == "function" ? (given as (...args: A) => T)(...args) : given;

/**
 * Watch a field while the component is mounted: `const ref = useUpbeat({ session, token })`, then `<textarea ref={ref} />`.
 *
 * Rendering again costs nothing, and functions may be new ones each time. Another session, as a string, withdraws the hint of the one before.
 */
export function useUpbeat<E extends Element = HTMLTextAreaElement>(options: UpbeatOptions): RefObject<E | null> {
  const ref = useRef<E>(null);
  const latest = useRef(options);
  useEffect(() => {
    latest.current = options;
  });
  const { session, token, url, focus, model } = options;
  useEffect(
    () =>
      attach(() => (latest.current.target ? value(latest.current.target) : ref.current), {
        session: () => value(latest.current.session),
        token: typeof token == "function" ? (id) => value(latest.current.token as typeof token, id) : token,
        url,
        focus,
        model,
      }).detach,
    [typeof session == "function" || session, typeof token == "function" || token, url, focus, model],
  );
  return ref;
}
