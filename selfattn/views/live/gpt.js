/*
 * The script of a page of a GPT of letters.
 */

import { run } from "./gpt_page.js";
import { lettersOf } from "./letters.js";

run(({ letters }) => lettersOf(letters));
