/**
 * Tells an Upbeat gateway that somebody begins to type: "this session is about to speak", and never a byte of what is typed.
 *
 * Once somebody types (or composes, pastes, dictates) where one watches, a hint leaves at once, then at most one in 4 s while typing goes on;
 * each counts for 6 s. Closing the page, leaving the route, switching to another session, or detaching withdraws a hint that still counts.
 * Whatever fails, the page never hears of it: no exception, no rejection. A gateway that fails or says 429 is asked less and less often.
 */
/** What to watch: a CSS selector (of the field, or of anything around it), an element, or a function that says one of these. */
export type Target = string | Element | (() => string | Element | null | undefined);
export interface Options {
    /** The session id that the chat's requests carry, or a function that says the current one; nothing is sent while there is none. */
    session: string | null | undefined | (() => string | null | undefined);
    /** A browser token (`POST /v1/client_secrets`), or a function that fetches one for a session: asked when the field gets the focus or
     * the first key, and again whenever the gateway refuses what it gave last. */
    token?: string | ((session: string) => string | Promise<string>);
    /** The gateway, such as `https://llm.example.com`. Default: where the script tag's file came from; for the module, the page's own origin. */
    url?: string;
    /** Focus counts as typing. */
    focus?: boolean;
    /** The model that will be asked, where it is not the session's last one. */
    model?: string;
}
export interface Handle {
    /** Hint now, as a key would: for a voice button, say. */
    advise: () => void;
    /** The module's `bind`. */
    bind: typeof bind;
    /** Withdraw the hint and stop watching. */
    detach: () => void;
}
/** A new chat that was announced under a provisional id has got its real one. */
export declare const bind: (provisionalId: string, realId: string) => void;
/** Watch `target`. The listeners are the window's: the field may come later, and be rendered again and again. */
export declare const attach: (target: Target, { session, token, url, focus, model }?: Options) => Handle;
