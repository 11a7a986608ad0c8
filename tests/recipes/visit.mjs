// Types a message into a recipe's page as a person would, sends it, and prints what the page then says.
// CHROMIUM, PAGE: the program and the address; FIELD, ANSWER: selectors.
import { createRequire } from "node:module";
import { dirname, join } from "node:path";
import { fileURLToPath } from "node:url";

const here = dirname(fileURLToPath(import.meta.url));
const { chromium } = createRequire(join(here, "../../web-sdk/package.json"))("playwright-core");
const { CHROMIUM, PAGE, FIELD, ANSWER } = process.env;

const browser = await chromium.launch({ executablePath: CHROMIUM, args: ["--no-sandbox", "--disable-gpu"] });
try {
  const tab = await browser.newPage();
  const hints = [];
  tab.on("response", (answer) => /\/v1\/(advisory|invalidate)$/.test(answer.url()) && hints.push(`${new URL(answer.url()).pathname} ${answer.status()}`));
  const ask = async (text) => {
    await tab.waitForSelector(FIELD);
    await tab.click(FIELD);
    // Until a hint has been taken: the page may still be coming to life.
    const taken = tab.waitForResponse((answer) => answer.url().endsWith("/v1/advisory") && answer.status() == 202);
    await tab.keyboard.type(text);
    await taken;
    await tab.keyboard.press("Enter");
    await tab.waitForFunction((answer) => /\d+ \d+ /.test(document.querySelector(answer)?.textContent ?? ""), ANSWER);
  };
  await tab.goto(PAGE, { waitUntil: "domcontentloaded" });
  await ask("zebra");
  const answer = await tab.textContent(ANSWER);
  await tab.goto("about:blank");
  console.log(JSON.stringify({ answer, hints }));
} finally {
  await browser.close();
}
