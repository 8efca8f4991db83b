/*
 * The script of a page of a language model: that of a GPT, for packs with letters, and for those with a tokenizer.
 */

import { run } from "../../../../selfattn/views/live/gpt_page.js";
import { lettersOf } from "../../../../selfattn/views/live/letters.js";
import { Tokenizer } from "./tokenizers.js";

run((tables) => (tables.letters ? lettersOf(tables.letters) : new Tokenizer(tables)));
