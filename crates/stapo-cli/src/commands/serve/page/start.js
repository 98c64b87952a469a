"use strict";
stapo.app.start();
